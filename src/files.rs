//! The only code that creates, renames or removes files.
