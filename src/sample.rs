//! Logits to token.
