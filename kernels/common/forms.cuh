// The forms of weights that kernels are made for, as FORM(NAME, BITS, G): one a program where it is named (ONE_FORM and FORM_w4 and so on),
// else all. Included once by each file that defines FORM.
#if !defined(ONE_FORM) || defined(FORM_w4)
FORM(w4, 4, 128)
#endif
#if !defined(ONE_FORM) || defined(FORM_w4_g64)
FORM(w4_g64, 4, 64)
#endif
#if !defined(ONE_FORM) || defined(FORM_w4_g32)
FORM(w4_g32, 4, 32)
#endif
#if !defined(ONE_FORM) || defined(FORM_w8)
FORM(w8, 8, 128)
#endif
#if !defined(ONE_FORM) || defined(FORM_w8_g64)
FORM(w8_g64, 8, 64)
#endif
#if !defined(ONE_FORM) || defined(FORM_w8_g32)
FORM(w8_g32, 8, 32)
#endif
#if !defined(ONE_FORM) || defined(FORM_w8_c)
FORM(w8_c, 8, 0)
#endif
#if !defined(ONE_FORM) || defined(FORM_w16)
FORM(w16, 16, 0)
#endif
#undef FORM
