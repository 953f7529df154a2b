//! Errors as a client sees them: a status, a stable code and a text that names
//! the thing, the value and the limit.

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Stable `snake_case` code.
    pub code: &'static str,
    /// Text for a person.
    pub message: String,
}

impl ApiError {
    /// A 400 with code `bad_request`.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self { status: 400, code: "bad_request", message: message.into() }
    }

    /// A 404 with code `not_found`.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { status: 404, code: "not_found", message: message.into() }
    }

    /// A 503: nothing happened, and the call may be repeated as it is.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { status: 503, code: "unavailable", message: message.into() }
    }

    /// A 503 for a call that may or may not have committed.
    pub fn outcome_unknown(message: impl Into<String>) -> Self {
        Self { status: 503, code: "outcome_unknown", message: message.into() }
    }

    /// The JSON body `{"success":false,"error":…,"code":…}`.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::json!({"success": false, "error": self.message, "code": self.code})
            .to_string()
            .into_bytes()
    }
}
