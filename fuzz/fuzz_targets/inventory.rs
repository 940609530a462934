#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moe_fuzz::inventory(data));
