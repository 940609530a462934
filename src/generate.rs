//! The loop that turns a prompt into tokens.
