//! The least of an HTTP/1.1 client: one connection, one request at a time. A
//! library would cost more than what it measures.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// One connection.
pub struct Client {
    address: String,
    stream: Option<TcpStream>,
    input: Vec<u8>,
}

impl Client {
    /// `address` is host and port. Connects with the first request.
    pub fn new(address: &str) -> Self {
        Self { address: address.to_owned(), stream: None, input: Vec::new() }
    }

    /// Sends one request; its status and body. A failed connection is made anew by the next one.
    pub fn call(&mut self, method: &str, target: &str, body: &[u8]) -> std::io::Result<(u16, Vec<u8>)> {
        let result = self.exchange(method, target, body);
        if result.is_err() {
            self.stream = None;
        }
        result
    }

    fn exchange(&mut self, method: &str, target: &str, body: &[u8]) -> std::io::Result<(u16, Vec<u8>)> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(&self.address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(Duration::from_secs(90)))?;
            self.stream = Some(stream);
        }
        let stream = self.stream.as_mut().expect("just made");
        let mut out = Vec::with_capacity(body.len() + 256);
        write!(
            out,
            "{method} {target} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n",
            self.address,
            body.len()
        )?;
        out.extend_from_slice(body);
        stream.write_all(&out)?;
        self.input.clear();
        let mut buffer = [0; 64 * 1024];
        loop {
            let n = stream.read(&mut buffer)?;
            if n == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            self.input.extend_from_slice(&buffer[..n]);
            let mut headers = [httparse::EMPTY_HEADER; 32];
            let mut response = httparse::Response::new(&mut headers);
            let parsed = response.parse(&self.input).map_err(std::io::Error::other)?;
            let httparse::Status::Complete(head) = parsed else { continue };
            let length: usize = response
                .headers
                .iter()
                .find(|header| header.name.eq_ignore_ascii_case("content-length"))
                .and_then(|header| std::str::from_utf8(header.value).ok()?.trim().parse().ok())
                .unwrap_or(0);
            let status = response.code.unwrap_or(0);
            let mut answer = self.input.split_off(head);
            let had = answer.len();
            answer.resize(length, 0);
            if had < length {
                stream.read_exact(&mut answer[had..])?;
            }
            return Ok((status, answer));
        }
    }
}
