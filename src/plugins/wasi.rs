//! WASI 0.2, with nothing behind it: language runtimes import it, so it has to be
//! there. Clocks and random numbers are real, environment and directories empty,
//! stdout and stderr go to the log; everything else traps when it is called.
//!
//! Not `wasmtime-wasi`: a guest that sleeps in it holds its thread, since epochs do
//! not interrupt host functions, and it brings an async runtime.

use std::time::{SystemTime, UNIX_EPOCH};

use wasmtime::component::{ComponentType, Lift, Linker, Lower, Resource, ResourceType};
use wasmtime::{Result, StoreContextMut};

use super::MAX_TEXT;
use super::filter_world::waspmq::plugin::logging::Level;
use super::host::Guest;

/// Host side of the resources; no instance of them has any state.
struct InputStream;
struct OutputStream;
struct IoError;
struct Pollable;
struct Descriptor;
struct TerminalInput;
struct TerminalOutput;

#[derive(ComponentType, Lift, Lower)]
#[component(record)]
struct Datetime {
    seconds: u64,
    nanoseconds: u32,
}

#[derive(ComponentType, Lift, Lower)]
#[component(variant)]
enum StreamError {
    #[component(name = "last-operation-failed")]
    LastOperationFailed(Resource<IoError>),
    #[component(name = "closed")]
    Closed,
}

/// Bytes that a write may have.
const WRITE_BYTES: u64 = 4096;
/// Random bytes of one call.
const MAX_RANDOM: u64 = 64 * 1024;

fn random_u64() -> u64 {
    // Its 122 random bits come from the system's generator.
    let bits = uuid::Uuid::new_v4().as_u128();
    (bits as u64) ^ ((bits >> 64) as u64).rotate_left(29)
}

fn random_bytes(length: u64) -> Result<Vec<u8>> {
    if length > MAX_RANDOM {
        return Err(wasmtime::format_err!("{length} random bytes at once; at most {MAX_RANDOM}"));
    }
    let mut bytes = Vec::with_capacity(length as usize + 8);
    while (bytes.len() as u64) < length {
        bytes.extend_from_slice(&random_u64().to_le_bytes());
    }
    bytes.truncate(length as usize);
    Ok(bytes)
}

/// Whole lines to the log; what is left waits for its end.
fn write(guest: &mut Guest, bytes: &[u8]) {
    let mut held = std::mem::take(&mut guest.stdio);
    held.extend_from_slice(bytes);
    while let Some(end) = held.iter().position(|byte| *byte == b'\n') {
        let line: Vec<u8> = held.drain(..=end).collect();
        guest.say(Level::Info, String::from_utf8_lossy(&line).trim_end());
    }
    if held.len() > MAX_TEXT {
        guest.say(Level::Info, &String::from_utf8_lossy(&held));
        held.clear();
    }
    guest.stdio = held;
}

/// Defines what this module has of one import, `wasi:package/interface@version`.
pub(super) fn add_to_linker(linker: &mut Linker<Guest>, import: &str) -> Result<()> {
    let interface = import.split('@').next().unwrap_or(import);
    if !interface.starts_with("wasi:") {
        return Ok(());
    }
    let mut i = linker.instance(import)?;
    type Cx<'a> = StoreContextMut<'a, Guest>;
    match interface {
        "wasi:cli/environment" => {
            i.func_wrap("get-environment", |_: Cx<'_>, ()| Ok((Vec::<(String, String)>::new(),)))?;
            i.func_wrap("get-arguments", |_: Cx<'_>, ()| Ok((Vec::<String>::new(),)))?;
            i.func_wrap("initial-cwd", |_: Cx<'_>, ()| Ok((None::<String>,)))?;
        }
        "wasi:cli/exit" => {
            i.func_wrap("exit", |_: Cx<'_>, (_,): (Result<(), ()>,)| {
                Err::<(), _>(wasmtime::format_err!("it called exit"))
            })?;
        }
        "wasi:cli/stdin" => {
            i.func_wrap("get-stdin", |_: Cx<'_>, ()| Ok((Resource::<InputStream>::new_own(0),)))?;
        }
        "wasi:cli/stdout" => {
            i.func_wrap("get-stdout", |_: Cx<'_>, ()| Ok((Resource::<OutputStream>::new_own(1),)))?;
        }
        "wasi:cli/stderr" => {
            i.func_wrap("get-stderr", |_: Cx<'_>, ()| Ok((Resource::<OutputStream>::new_own(2),)))?;
        }
        "wasi:cli/terminal-input" => {
            i.resource("terminal-input", ResourceType::host::<TerminalInput>(), |_, _| Ok(()))?;
        }
        "wasi:cli/terminal-output" => {
            i.resource("terminal-output", ResourceType::host::<TerminalOutput>(), |_, _| Ok(()))?;
        }
        "wasi:cli/terminal-stdin" => {
            i.func_wrap("get-terminal-stdin", |_: Cx<'_>, ()| Ok((None::<Resource<TerminalInput>>,)))?;
        }
        "wasi:cli/terminal-stdout" => {
            i.func_wrap("get-terminal-stdout", |_: Cx<'_>, ()| Ok((None::<Resource<TerminalOutput>>,)))?;
        }
        "wasi:cli/terminal-stderr" => {
            i.func_wrap("get-terminal-stderr", |_: Cx<'_>, ()| Ok((None::<Resource<TerminalOutput>>,)))?;
        }
        "wasi:io/error" => {
            i.resource("error", ResourceType::host::<IoError>(), |_, _| Ok(()))?;
        }
        "wasi:io/poll" => {
            i.resource("pollable", ResourceType::host::<Pollable>(), |_, _| Ok(()))?;
        }
        "wasi:io/streams" => {
            i.resource("input-stream", ResourceType::host::<InputStream>(), |_, _| Ok(()))?;
            i.resource("output-stream", ResourceType::host::<OutputStream>(), |_, _| Ok(()))?;
            for read in ["[method]input-stream.read", "[method]input-stream.blocking-read"] {
                i.func_wrap(read, |_: Cx<'_>, (_, _): (Resource<InputStream>, u64)| {
                    Ok((Err::<Vec<u8>, StreamError>(StreamError::Closed),))
                })?;
            }
            i.func_wrap(
                "[method]output-stream.check-write",
                |_: Cx<'_>, (_,): (Resource<OutputStream>,)| Ok((Ok::<u64, StreamError>(WRITE_BYTES),)),
            )?;
            for out in ["[method]output-stream.write", "[method]output-stream.blocking-write-and-flush"] {
                i.func_wrap(out, |mut cx: Cx<'_>, (_, bytes): (Resource<OutputStream>, Vec<u8>)| {
                    write(cx.data_mut(), &bytes);
                    Ok((Ok::<(), StreamError>(()),))
                })?;
            }
            for flush in ["[method]output-stream.flush", "[method]output-stream.blocking-flush"] {
                i.func_wrap(flush, |_: Cx<'_>, (_,): (Resource<OutputStream>,)| {
                    Ok((Ok::<(), StreamError>(()),))
                })?;
            }
        }
        "wasi:clocks/monotonic-clock" => {
            let start = std::time::Instant::now();
            i.func_wrap("now", move |_: Cx<'_>, ()| Ok((start.elapsed().as_nanos() as u64,)))?;
            i.func_wrap("resolution", |_: Cx<'_>, ()| Ok((1u64,)))?;
        }
        "wasi:clocks/wall-clock" => {
            i.func_wrap("now", |_: Cx<'_>, ()| {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Ok((Datetime { seconds: now.as_secs(), nanoseconds: now.subsec_nanos() },))
            })?;
            i.func_wrap("resolution", |_: Cx<'_>, ()| Ok((Datetime { seconds: 0, nanoseconds: 1 },)))?;
        }
        "wasi:random/random" => {
            i.func_wrap("get-random-bytes", |_: Cx<'_>, (n,): (u64,)| Ok((random_bytes(n)?,)))?;
            i.func_wrap("get-random-u64", |_: Cx<'_>, ()| Ok((random_u64(),)))?;
        }
        "wasi:random/insecure" => {
            i.func_wrap("get-insecure-random-bytes", |_: Cx<'_>, (n,): (u64,)| Ok((random_bytes(n)?,)))?;
            i.func_wrap("get-insecure-random-u64", |_: Cx<'_>, ()| Ok((random_u64(),)))?;
        }
        "wasi:random/insecure-seed" => {
            i.func_wrap("insecure-seed", |_: Cx<'_>, ()| Ok(((random_u64(), random_u64()),)))?;
        }
        "wasi:filesystem/types" => {
            i.resource("descriptor", ResourceType::host::<Descriptor>(), |_, _| Ok(()))?;
        }
        "wasi:filesystem/preopens" => {
            i.func_wrap("get-directories", |_: Cx<'_>, ()| {
                Ok((Vec::<(Resource<Descriptor>, String)>::new(),))
            })?;
        }
        _ => {}
    }
    Ok(())
}
