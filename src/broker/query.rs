//! Query strings.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

use super::error::ApiError;

/// The parameters of a query string, decoded on demand. Of a repeated key the last one counts.
#[derive(Clone, Copy)]
pub struct Query<'a>(&'a str);

impl<'a> Query<'a> {
    /// From what follows the `?`.
    pub fn new(text: &'a str) -> Self {
        Self(text)
    }

    /// A parameter's text. A 400 if it is not UTF-8.
    pub fn get(&self, name: &str) -> Result<Option<Cow<'a, str>>, ApiError> {
        let found = self
            .0
            .split('&')
            .filter_map(|pair| pair.split_once('=').or((!pair.is_empty()).then_some((pair, ""))))
            .rfind(|(key, _)| {
                *key == name || (key.contains(['%', '+']) && decode(key).is_some_and(|key| key == name))
            });
        match found {
            None => Ok(None),
            Some((_, value)) => match decode(value) {
                Some(text) => Ok(Some(text)),
                None => Err(ApiError::bad_request(format!("{name} is not valid UTF-8"))),
            },
        }
    }

    /// A parameter's text; an empty one counts as absent.
    pub fn text(&self, name: &str) -> Result<Option<Cow<'a, str>>, ApiError> {
        Ok(self.get(name)?.filter(|text| !text.is_empty()))
    }

    /// All parameters whose name starts with a prefix: the rest of the name, and the text.
    pub fn with_prefix(&self, prefix: &str) -> Result<Vec<(String, String)>, ApiError> {
        let mut found = Vec::new();
        for pair in self.0.split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let Some(key) = decode(key) else { continue };
            let Some(rest) = key.strip_prefix(prefix) else { continue };
            let value =
                decode(value).ok_or_else(|| ApiError::bad_request(format!("{key} is not valid UTF-8")))?;
            found.push((rest.to_owned(), value.into_owned()));
        }
        Ok(found)
    }

    /// `true`/`1` or `false`/`0`; `default` if absent, else a 400.
    pub fn boolean(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.text(name)?.as_deref() {
            None => Ok(default),
            Some("true" | "1") => Ok(true),
            Some("false" | "0") => Ok(false),
            Some(other) => Err(ApiError::bad_request(format!(
                "{name} must be true, 1, false or 0, got \"{}\"",
                shorten(other)
            ))),
        }
    }

    /// A whole number, or a 400.
    pub fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        match self.text(name)? {
            None => Ok(None),
            Some(text) => match text.trim().parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(ApiError::bad_request(format!(
                    "{name} must be a whole number, got \"{}\"",
                    shorten(&text)
                ))),
            },
        }
    }
}

/// The start of a text, for a message about it.
pub fn shorten(text: &str) -> &str {
    match text.char_indices().nth(100) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

/// Decodes `%XX` and `+`; `None` if the result is not UTF-8.
fn decode(text: &str) -> Option<Cow<'_, str>> {
    if text.contains('+') {
        let spaced = text.replace('+', " ");
        return percent_decode_str(&spaced).decode_utf8().ok().map(|text| Cow::Owned(text.into_owned()));
    }
    percent_decode_str(text).decode_utf8().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_and_the_last_counts() {
        let query = Query::new("a=1&b=x%20y+z%C3%A4&a=2&flag&c=");
        assert_eq!(query.integer("a").unwrap(), Some(2));
        assert_eq!(query.get("b").unwrap().as_deref(), Some("x y zä"));
        assert_eq!(query.get("flag").unwrap().as_deref(), Some(""));
        assert_eq!(query.text("c").unwrap(), None);
        assert_eq!(query.get("d").unwrap(), None);
    }

    #[test]
    fn wrong_values_are_named() {
        let query = Query::new("wait=yes&n=1.5&bad=%FF");
        assert_eq!(
            query.boolean("wait", false).unwrap_err().message,
            "wait must be true, 1, false or 0, got \"yes\""
        );
        assert_eq!(query.integer("n").unwrap_err().message, "n must be a whole number, got \"1.5\"");
        assert_eq!(query.get("bad").unwrap_err().message, "bad is not valid UTF-8");
        assert!(query.boolean("absent", true).unwrap());
    }
}
