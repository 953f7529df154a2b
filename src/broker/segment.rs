//! The bytes of a segment: messages as frames, packed and compressed.
//!
//! A frame, little-endian: `u32` length of what follows; `u8` flags; 16 bytes
//! message id; [16 bytes trace id]; [`u16` + transaction id]; [`u16` + producer
//! subject]; the payload, byte for byte. A message without a transaction id of its
//! own has its id's text for one, which is not stored twice.

use std::borrow::Cow;

use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_128;

/// Frames as they are.
pub const CODEC_RAW: i16 = 0;
/// Frames compressed with zstd.
pub const CODEC_ZSTD: i16 = 1;

/// Shorter segments are not worth compressing, in bytes.
const MIN_COMPRESSED: usize = 128;
/// zstd's default: higher levels cost several times the time for a few percent.
const LEVEL: i32 = 3;
/// Largest segment unpacked: bodies are at most 512 MiB, and frames add little.
const MAX_UNPACKED: usize = 1 << 30;

const HAS_TRACE: u8 = 1;
const HAS_SUB: u8 = 2;
const HAS_TRANSACTION: u8 = 4;
const KNOWN_FLAGS: u8 = HAS_TRACE | HAS_SUB | HAS_TRANSACTION;

/// One message of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The id the broker gave it.
    pub message_id: Uuid,
    /// The client's trace id.
    pub trace_id: Option<Uuid>,
    /// The client's transaction id; `None`: the message id's text. Use [`Frame::transaction_id`].
    pub own_transaction_id: Option<&'a str>,
    /// Who produced it, from a checked token.
    pub producer_sub: Option<&'a str>,
    /// The payload.
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// The transaction id; `buffer` holds it where it is the message id's text.
    pub fn transaction_id<'b>(&self, buffer: &'b mut [u8; 36]) -> &'b str
    where
        'a: 'b,
    {
        match self.own_transaction_id {
            Some(own) => own,
            None => self.message_id.hyphenated().encode_lower(buffer),
        }
    }

    /// xxh3-128 of the transaction id's bytes.
    pub fn hash(&self) -> u128 {
        transaction_hash(self.transaction_id(&mut [0; 36]))
    }
}

/// What identifies a transaction id in the database: xxh3-128 of its bytes.
pub fn transaction_hash(transaction_id: &str) -> u128 {
    xxh3_128(transaction_id.as_bytes())
}

/// The hashes in a segment's `hashes`: 16 bytes each, big-endian.
pub fn hashes_of(bytes: &[u8]) -> impl Iterator<Item = u128> + '_ {
    bytes.chunks_exact(16).map(|chunk| u128::from_be_bytes(chunk.try_into().expect("chunks of 16")))
}

/// Appends a frame. Texts must be at most 65,535 bytes, the frame less than 4 GiB.
pub fn write_frame(out: &mut Vec<u8>, frame: &Frame<'_>) {
    let start = out.len();
    out.extend_from_slice(&[0; 5]);
    out.extend_from_slice(frame.message_id.as_bytes());
    let mut flags = 0;
    if let Some(trace) = frame.trace_id {
        flags |= HAS_TRACE;
        out.extend_from_slice(trace.as_bytes());
    }
    if let Some(text) = frame.own_transaction_id {
        flags |= HAS_TRANSACTION;
        write_text(out, text);
    }
    if let Some(text) = frame.producer_sub {
        flags |= HAS_SUB;
        write_text(out, text);
    }
    out.extend_from_slice(frame.payload);
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
    out[start + 4] = flags;
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u16).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// Stored bytes that are not what this broker writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a stored segment cannot be read: {0}")]
pub struct CorruptSegment(&'static str);

/// The frames of unpacked bytes, in order.
pub fn frames(raw: &[u8]) -> Frames<'_> {
    Frames { rest: raw }
}

/// See [`frames`]. Ends after the first error.
pub struct Frames<'a> {
    rest: &'a [u8],
}

impl<'a> Frames<'a> {
    /// Passes over `n` frames without looking into them.
    pub fn skip_frames(&mut self, n: usize) {
        for _ in 0..n {
            if !matches!(self.body(), Some(Ok(_))) {
                self.rest = &[];
                return;
            }
        }
    }

    fn body(&mut self) -> Option<Result<&'a [u8], CorruptSegment>> {
        if self.rest.is_empty() {
            return None;
        }
        let body = self.rest.split_first_chunk::<4>().and_then(|(length, rest)| {
            let length = u32::from_le_bytes(*length) as usize;
            rest.split_at_checked(length)
        });
        match body {
            Some((body, rest)) => {
                self.rest = rest;
                Some(Ok(body))
            }
            None => {
                self.rest = &[];
                Some(Err(CorruptSegment("it ends inside a message")))
            }
        }
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, CorruptSegment>;

    fn next(&mut self) -> Option<Self::Item> {
        let frame = self.body()?.and_then(read_frame);
        if frame.is_err() {
            self.rest = &[];
        }
        Some(frame)
    }
}

fn read_frame(body: &[u8]) -> Result<Frame<'_>, CorruptSegment> {
    let short = CorruptSegment("a message is cut short");
    let (&flags, rest) = body.split_first().ok_or(short)?;
    if flags & !KNOWN_FLAGS != 0 {
        return Err(CorruptSegment("a message has flags of a later version"));
    }
    let (id, mut rest) = rest.split_first_chunk::<16>().ok_or(short)?;
    let mut trace_id = None;
    if flags & HAS_TRACE != 0 {
        let (trace, behind) = rest.split_first_chunk::<16>().ok_or(short)?;
        trace_id = Some(Uuid::from_bytes(*trace));
        rest = behind;
    }
    let mut text = |present: u8| -> Result<Option<&str>, CorruptSegment> {
        if flags & present == 0 {
            return Ok(None);
        }
        let (length, behind) = rest.split_first_chunk::<2>().ok_or(short)?;
        let (text, behind) =
            behind.split_at_checked(usize::from(u16::from_le_bytes(*length))).ok_or(short)?;
        rest = behind;
        std::str::from_utf8(text).map(Some).map_err(|_| CorruptSegment("a text is not UTF-8"))
    };
    let own_transaction_id = text(HAS_TRANSACTION)?;
    let producer_sub = text(HAS_SUB)?;
    Ok(Frame { message_id: Uuid::from_bytes(*id), trace_id, own_transaction_id, producer_sub, payload: rest })
}

/// Largest segment unpacked, in bytes, and in messages: what a pop of one message has to read at most.
const SEGMENT_BYTES: usize = 256 * 1024;
const SEGMENT_MESSAGES: usize = 1_000;

/// One segment to be.
pub struct Run<'a> {
    /// Its first message, counted from the first one cut.
    pub base: usize,
    /// 16 bytes per message.
    pub hashes: Vec<u8>,
    /// Its frames.
    pub frames: Cow<'a, [u8]>,
}

/// Cuts messages (frame, hash of the transaction id) into segments.
pub fn cut<'a>(messages: impl Iterator<Item = (&'a [u8], u128)>) -> Vec<Run<'a>> {
    let mut runs: Vec<Run<'a>> = Vec::new();
    for (base, (frame, hash)) in messages.enumerate() {
        match runs.last_mut() {
            Some(run)
                if run.frames.len() + frame.len() <= SEGMENT_BYTES
                    && run.hashes.len() / 16 < SEGMENT_MESSAGES =>
            {
                run.frames.to_mut().extend_from_slice(frame);
                run.hashes.extend_from_slice(&hash.to_be_bytes());
            }
            _ => runs.push(Run { base, hashes: hash.to_be_bytes().to_vec(), frames: Cow::Borrowed(frame) }),
        }
    }
    runs
}

/// Packs segments; keeps its compressor between calls.
pub struct Packer {
    zstd: Option<zstd::bulk::Compressor<'static>>,
}

impl Default for Packer {
    fn default() -> Self {
        Self::new()
    }
}

impl Packer {
    /// A packer.
    pub fn new() -> Self {
        Self { zstd: zstd::bulk::Compressor::new(LEVEL).ok() }
    }

    /// The smaller of the frames and their compressed form, and its codec.
    pub fn pack<'a>(&mut self, frames: &'a [u8]) -> (i16, Cow<'a, [u8]>) {
        if frames.len() >= MIN_COMPRESSED
            && let Some(zstd) = &mut self.zstd
            && let Ok(packed) = zstd.compress(frames)
            && packed.len() < frames.len()
        {
            return (CODEC_ZSTD, packed.into());
        }
        (CODEC_RAW, frames.into())
    }
}

/// A segment's frames.
pub fn unpack(codec: i16, data: &[u8]) -> Result<Cow<'_, [u8]>, CorruptSegment> {
    match codec {
        CODEC_RAW => Ok(data.into()),
        CODEC_ZSTD => {
            let size = zstd::zstd_safe::get_frame_content_size(data).ok().flatten().unwrap_or(0) as usize;
            if size > MAX_UNPACKED {
                return Err(CorruptSegment("it claims to be larger than any segment"));
            }
            let unpacked = zstd::bulk::decompress(data, size)
                .map_err(|_| CorruptSegment("it cannot be decompressed"))?;
            Ok(unpacked.into())
        }
        _ => Err(CorruptSegment("its codec is of a later version")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_back_as_they_were_written(
            messages in prop::collection::vec(
                (any::<u128>(), prop::option::of(any::<u128>()), prop::option::of(".{1,300}"), prop::option::of(".{1,30}"),
                 prop::collection::vec(any::<u8>(), 0..400)), 0..20),
            skip in 0usize..25,
        ) {
            let written: Vec<Frame<'_>> = messages
                .iter()
                .map(|(id, trace, transaction, sub, payload)| Frame {
                    message_id: Uuid::from_u128(*id),
                    trace_id: trace.map(Uuid::from_u128),
                    own_transaction_id: transaction.as_deref(),
                    producer_sub: sub.as_deref(),
                    payload,
                })
                .collect();
            let mut bytes = Vec::new();
            for frame in &written {
                write_frame(&mut bytes, frame);
            }
            let (codec, packed) = Packer::new().pack(&bytes);
            let raw = unpack(codec, &packed).unwrap();
            let mut read = frames(&raw);
            read.skip_frames(skip);
            let read: Vec<Frame<'_>> = read.map(Result::unwrap).collect();
            prop_assert_eq!(&read[..], written.get(skip..).unwrap_or(&[]));
        }

        #[test]
        fn damaged_bytes_are_an_error_and_never_a_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200), codec in 0i16..3,
        ) {
            if let Ok(raw) = unpack(codec, &bytes) {
                let _ = frames(&raw).count();
            }
            if bytes.len() > 4 {
                let length = bytes.len() as u32 - 4;
                bytes[..4].copy_from_slice(&length.to_le_bytes());
                let _ = frames(&bytes).count();
            }
        }
    }

    #[test]
    fn a_message_without_its_own_transaction_id_has_its_id_for_one() {
        let id = Uuid::from_u128(0x1234);
        let frame = Frame {
            message_id: id,
            trace_id: None,
            own_transaction_id: None,
            producer_sub: None,
            payload: b"1",
        };
        assert_eq!(frame.transaction_id(&mut [0; 36]), id.to_string());
        assert_eq!(frame.hash(), transaction_hash(&id.to_string()));
    }

    #[test]
    fn repetitive_frames_get_smaller_and_small_ones_stay_as_they_are() {
        let mut packer = Packer::new();
        let large = vec![b'x'; 10_000];
        let (codec, packed) = packer.pack(&large);
        assert_eq!(codec, CODEC_ZSTD);
        assert!(packed.len() < 200, "{}", packed.len());
        assert_eq!(packer.pack(b"small").0, CODEC_RAW);
    }
}
