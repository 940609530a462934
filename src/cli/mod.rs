//! What the user typed.
