//! Pages.
#![allow(missing_docs)]
use serde_json::Value;
pub fn html(_: &Value) -> Result<String, std::fmt::Error> {
    Ok(String::new())
}
pub fn markdown(_: &Value) -> String {
    String::new()
}
pub fn csv(_: &Value) -> String {
    String::new()
}
