//! The bytes of a segment: messages as frames, packed and compressed.
