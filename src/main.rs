//! The `waspmq` command.
fn main() {}
