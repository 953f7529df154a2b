//! The bytes of HTTP/1.x, for both edges: requests out of input, replies into output.

use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{EdgeLimits, MAX_HEAD_BYTES, Method, Reply};

/// Headers of one request.
const MAX_HEADERS: usize = 100;

/// Whether the peer has closed, as far as the kernel knows at this moment.
pub fn peer_is_gone(socket: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid pollfd, no timeout.
    let ready = unsafe { libc::poll(&mut poll, 1, 0) };
    ready > 0 && poll.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
}

/// Path and query of a target, also of one in absolute form.
pub fn origin_form(target: &str) -> &str {
    match target.split_once("://") {
        Some((_, behind)) if !target.starts_with('/') => behind.find('/').map_or("/", |at| &behind[at..]),
        _ => target,
    }
}

/// The code of a refusal that comes from the wire.
pub fn code_of(status: u16) -> &'static str {
    match status {
        408 => "timeout",
        413 => "too_large",
        431 => "head_too_large",
        501 => "not_implemented",
        505 => "version",
        _ => "bad_request",
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "Status",
    }
}

/// Appends a reply's bytes.
pub fn write_reply(out: &mut Vec<u8>, reply: &Reply, head_only: bool, close: bool) {
    let _ = write!(out, "HTTP/1.1 {} {}\r\n", reply.status, reason(reply.status));
    for (name, value) in &reply.headers {
        let _ = write!(out, "{name}: {value}\r\n");
    }
    if reply.status != 204 {
        let _ =
            write!(out, "Content-Type: {}\r\nContent-Length: {}\r\n", reply.content_type, reply.body.len());
    }
    out.extend_from_slice(if close { b"Connection: close\r\n\r\n" } else { b"\r\n" });
    if !head_only && reply.status != 204 {
        out.extend_from_slice(&reply.body);
    }
}

/// A request without its body.
pub struct Head {
    /// Its method.
    pub method: Method,
    /// Path and query.
    pub target: String,
    /// Credentials as sent.
    pub authorization: Option<String>,
    /// The connection ends with the answer.
    pub close: bool,
}

/// What the input holds.
pub enum Parsed {
    /// A request, and how much of the input it took.
    #[allow(missing_docs)]
    Whole { head: Head, body: Vec<u8>, length: usize },
    /// The start of one.
    More {
        /// Its client waits for a 100 before it sends the body.
        expects_continue: bool,
    },
    /// None: status and reason of the refusal.
    Bad(u16, String),
}

/// How far the body of an incomplete request has been read, so that no byte of it is looked at twice.
#[derive(Default)]
pub struct Progress {
    /// Input below this length cannot hold the whole request.
    needed: usize,
    /// Chunks so far.
    body: Vec<u8>,
    /// Input that they took, behind the head.
    taken: usize,
}

/// Reads one request from the start of `input`. `progress` is a new one for every
/// request, and the same one when more of its input has come.
pub fn parse_request(input: &[u8], limits: &EdgeLimits, progress: &mut Progress) -> Parsed {
    if input.len() < progress.needed {
        return Parsed::More { expects_continue: false };
    }
    let bad = |text: &str| Parsed::Bad(400, text.to_owned());
    // Empty lines before a request are allowed.
    let skipped = input.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
    let text = &input[skipped..];
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let too_large =
        || Parsed::Bad(431, format!("the request line and headers exceed {MAX_HEAD_BYTES} bytes"));
    let head_length = match request.parse(text) {
        Ok(httparse::Status::Complete(n)) if n > MAX_HEAD_BYTES => return too_large(),
        Ok(httparse::Status::Complete(n)) => n,
        Ok(httparse::Status::Partial) if text.len() > MAX_HEAD_BYTES => return too_large(),
        Ok(httparse::Status::Partial) => return Parsed::More { expects_continue: false },
        Err(httparse::Error::TooManyHeaders) => {
            return Parsed::Bad(431, format!("more than {MAX_HEADERS} headers"));
        }
        Err(httparse::Error::Version) => {
            return Parsed::Bad(505, "only HTTP/1.0 and HTTP/1.1 are spoken".to_owned());
        }
        Err(error) => return Parsed::Bad(400, format!("the request cannot be read: {error}")),
    };
    let http_1_1 = request.version == Some(1);
    let (mut length, mut chunked, mut close, mut keep, mut expects, mut hosts) =
        (None, false, false, false, false, 0);
    let mut authorization = None;
    for header in request.headers.iter() {
        let name = header.name;
        let value = || std::str::from_utf8(header.value).map(str::trim);
        if name.eq_ignore_ascii_case("content-length") {
            let number = value()
                .ok()
                .filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()));
            let Some(number) = number else { return bad("Content-Length is not a number") };
            // More digits than fit are more than any limit.
            let number = number.parse::<u64>().unwrap_or(u64::MAX);
            if length.is_some_and(|before| before != number) {
                return bad("several Content-Length headers that differ");
            }
            length = Some(number);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if chunked || !value().is_ok_and(|text| text.eq_ignore_ascii_case("chunked")) {
                return Parsed::Bad(
                    501,
                    "the only Transfer-Encoding that is understood is chunked".to_owned(),
                );
            }
            chunked = true;
        } else if name.eq_ignore_ascii_case("connection") {
            for token in value().unwrap_or("").split(',') {
                close |= token.trim().eq_ignore_ascii_case("close");
                keep |= token.trim().eq_ignore_ascii_case("keep-alive");
            }
        } else if name.eq_ignore_ascii_case("expect") {
            expects = value().is_ok_and(|text| text.eq_ignore_ascii_case("100-continue"));
        } else if name.eq_ignore_ascii_case("authorization") {
            authorization = value().ok().map(str::to_owned);
        } else if name.eq_ignore_ascii_case("host") {
            hosts += 1;
        }
    }
    if http_1_1 && hosts != 1 {
        return bad("an HTTP/1.1 request has exactly one Host header");
    }
    if chunked && length.is_some() {
        return bad("Content-Length and Transfer-Encoding together");
    }
    let too_long = |bytes: String| {
        Parsed::Bad(
            413,
            format!("the body of {bytes} bytes exceeds the limit of {} (--max-body)", limits.max_body_bytes),
        )
    };
    let rest = &text[head_length..];
    let (body, taken) = if chunked {
        match read_chunks(rest, limits.max_body_bytes, progress) {
            Chunks::Whole(taken) => (std::mem::take(&mut progress.body), taken),
            Chunks::More(needed) => {
                progress.needed = skipped + head_length + needed;
                return Parsed::More { expects_continue: expects };
            }
            Chunks::Bad => return bad("the chunked body cannot be read"),
            Chunks::TooLong => return too_long("more".to_owned()),
        }
    } else {
        let length = length.unwrap_or(0);
        if length > limits.max_body_bytes as u64 {
            return too_long(if length == u64::MAX { "very many".to_owned() } else { length.to_string() });
        }
        let length = length as usize;
        if rest.len() < length {
            progress.needed = skipped + head_length + length;
            return Parsed::More { expects_continue: expects && rest.is_empty() };
        }
        (rest[..length].to_vec(), length)
    };
    let head = Head {
        method: Method::of(request.method.unwrap_or("")),
        target: origin_form(request.path.unwrap_or("/")).to_owned(),
        authorization,
        close: close || (!http_1_1 && !keep),
    };
    Parsed::Whole { head, body, length: skipped + head_length + taken }
}

enum Chunks {
    /// The body is in the progress; input taken.
    Whole(usize),
    /// Nothing new can be said before there is so much input.
    More(usize),
    Bad,
    TooLong,
}

fn read_chunks(input: &[u8], limit: usize, progress: &mut Progress) -> Chunks {
    loop {
        let rest = &input[progress.taken..];
        let (consumed, size) = match httparse::parse_chunk_size(rest) {
            Ok(httparse::Status::Complete(found)) => found,
            Ok(httparse::Status::Partial) if rest.len() > 1024 => return Chunks::Bad,
            Ok(httparse::Status::Partial) => return Chunks::More(0),
            Err(_) => return Chunks::Bad,
        };
        let rest = &rest[consumed..];
        if size == 0 {
            // Trailers are read over.
            let mut trailers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            return match httparse::parse_headers(rest, &mut trailers) {
                Ok(httparse::Status::Complete((n, _))) => Chunks::Whole(progress.taken + consumed + n),
                Ok(httparse::Status::Partial) if rest.len() > MAX_HEAD_BYTES => Chunks::Bad,
                Ok(httparse::Status::Partial) => Chunks::More(0),
                Err(_) => Chunks::Bad,
            };
        }
        if size > (limit - progress.body.len()) as u64 {
            return Chunks::TooLong;
        }
        let size = size as usize;
        if rest.len() < size + 2 {
            return Chunks::More(progress.taken + consumed + size + 2);
        }
        progress.body.extend_from_slice(&rest[..size]);
        if &rest[size..size + 2] != b"\r\n" {
            return Chunks::Bad;
        }
        progress.taken += consumed + size + 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_that_comes_in_pieces_is_read_once_and_whole() {
        let limits = EdgeLimits { max_body_bytes: 20, max_connections: 1, io_threads: 1 };
        let head = "\r\nPOST /x HTTP/1.1\r\nHost: h\r\n";
        let cases = [
            (format!("{head}Content-Length: 5\r\n\r\nhello"), "hello"),
            (
                format!(
                    "{head}Transfer-Encoding: chunked\r\n\r\n3;x=1\r\nhel\r\n2\r\nlo\r\n0\r\nT: 1\r\n\r\n"
                ),
                "hello",
            ),
            (format!("{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), ""),
        ];
        for (text, expected) in cases {
            for step in [1, 2, 3, 7, text.len()] {
                let with_next = format!("{text}GET");
                let mut progress = Progress::default();
                for end in (step..text.len()).step_by(step) {
                    let found = parse_request(&with_next.as_bytes()[..end], &limits, &mut progress);
                    assert!(matches!(found, Parsed::More { .. }), "{text} at {end}");
                }
                match parse_request(with_next.as_bytes(), &limits, &mut progress) {
                    Parsed::Whole { body, length, .. } => {
                        assert_eq!((body.as_slice(), length), (expected.as_bytes(), text.len()), "{text}");
                    }
                    _ => panic!("{text}"),
                }
            }
        }
        let long = format!("{head}Transfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\nb\r\n");
        assert!(matches!(
            parse_request(long.as_bytes(), &limits, &mut Progress::default()),
            Parsed::Bad(413, _)
        ));
    }
}
