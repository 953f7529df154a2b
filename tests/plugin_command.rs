//! `waspmq plugin new|check|run`, as an author uses them.
#![allow(missing_docs)]

use std::path::Path;
use std::process::{Command, Output};

fn waspmq(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_waspmq")).args(arguments).current_dir(folder).output().unwrap()
}

fn out(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The samples, built by `script/plugins all`.
fn samples() -> String {
    std::env::var("WASPMQ_TEST_PLUGINS").expect("script/test sets it, after script/plugins all")
}

#[test]
fn a_new_folder_has_what_its_readme_says_and_does_not_overwrite() {
    let folder = tempfile::tempdir().unwrap();
    for lang in ["rust", "c", "javascript", "python"] {
        for kind in ["selector", "filter"] {
            let name = format!("my-{lang}-{kind}");
            let text = out(&waspmq(folder.path(), &["plugin", "new", "--lang", lang, "--kind", kind, &name]));
            let readme = std::fs::read_to_string(folder.path().join(&name).join("README.md")).unwrap();
            let build = readme.split("```sh\n").nth(1).unwrap().split("\n```").next().unwrap();
            assert!(text.contains(build), "{text}");
            assert!(
                !readme.contains("NAME") && !readme.contains("RESULT") && !readme.contains("BUILD"),
                "{readme}"
            );
            assert!(folder.path().join(&name).join("wit/plugin.wit").exists());
            let again = waspmq(folder.path(), &["plugin", "new", "--lang", lang, "--kind", kind, &name]);
            assert!(!again.status.success());
        }
    }
    assert!(
        !waspmq(folder.path(), &["plugin", "new", "--lang", "c", "--kind", "filter", "Bad_Name"])
            .status
            .success()
    );
}

/// Builds a new folder with its README's own command (or, where the build needs what CI
/// cannot fetch, with the tools that `script/plugins` has), then checks and runs the result.
fn builds(lang: &str, build: impl Fn(&Path, &str)) {
    let folder = tempfile::tempdir().unwrap();
    // Half a minute of compiling each.
    let kinds = if lang == "python" { &["filter"][..] } else { &["selector", "filter"] };
    for kind in kinds.iter().copied() {
        let name = format!("my-{kind}");
        out(&waspmq(folder.path(), &["plugin", "new", "--lang", lang, "--kind", kind, &name]));
        let inside = folder.path().join(&name);
        build(&inside, kind);
        let readme = std::fs::read_to_string(inside.join("README.md")).unwrap();
        let result = readme.split("waspmq plugin check ").nth(1).unwrap().lines().next().unwrap();
        assert!(out(&waspmq(&inside, &["plugin", "check", result])).contains(kind));
        let sample = if kind == "filter" {
            ["--messages", "messages.jsonl"]
        } else {
            ["--candidates", "candidates.jsonl"]
        };
        let text = out(&waspmq(&inside, &["plugin", "run", result, sample[0], sample[1]]));
        let expected =
            if kind == "filter" { "Default\tmessage-1\tdeliver\np\tmessage-2\tdeliver\n" } else { "b\na\n" };
        assert_eq!(text, expected, "{lang} {kind}");
        let refused = waspmq(&inside, &["plugin", "run", result, sample[0], sample[1], "--settings", "a=b"]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("setting"), "{lang} {kind}");
    }
}

fn shell(folder: &Path, script: &str) {
    let output = Command::new("sh").args(["-ec", script]).current_dir(folder).output().unwrap();
    assert!(
        output.status.success(),
        "{script}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn readme_command(folder: &Path) -> String {
    let readme = std::fs::read_to_string(folder.join("README.md")).unwrap();
    readme.split("```sh\n").nth(1).unwrap().split("\n```").next().unwrap().to_owned()
}

#[test]
fn a_new_c_plugin_builds() {
    builds("c", |folder, _| shell(folder, &readme_command(folder)));
}

#[test]
fn a_new_javascript_plugin_builds() {
    builds("javascript", |folder, _| shell(folder, &readme_command(folder)));
}

#[test]
fn a_new_python_plugin_builds() {
    builds("python", |folder, _| shell(folder, &readme_command(folder)));
}

#[test]
fn a_new_rust_plugin_builds() {
    // The target of rustup cannot be fetched everywhere: as `script/plugins` does it.
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/script/cargo-guest");
    builds("rust", |folder, _| {
        shell(folder, &format!("CARGO_TARGET_DIR=$PWD/target {script} build --release"))
    });
}

#[test]
fn check_says_what_files_are_and_fails_for_what_would_not_load() {
    let folder = tempfile::tempdir().unwrap();
    let samples = samples();
    let text = out(&waspmq(
        folder.path(),
        &["plugin", "check", &format!("{samples}/accept-all.wat"), &format!("{samples}/oldest-first.wasm")],
    ));
    assert!(
        text.contains("accept-all.wat: filter, ") && text.contains("oldest-first.wasm: selector, "),
        "{text}"
    );
    std::fs::write(folder.path().join("bad.wasm"), b"nothing").unwrap();
    let bad = waspmq(folder.path(), &["plugin", "check", &format!("{samples}/accept-all.wat"), "bad.wasm"]);
    assert_eq!(bad.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&bad.stdout).contains("bad.wasm: would not load"));
}

#[test]
fn run_shows_verdicts_and_orders() {
    let folder = tempfile::tempdir().unwrap();
    let samples = samples();
    let messages = "{\"payload\": {\"total\": 150}, \"id\": \"m1\"}\n{\"total\": 5}\n{\"total\": 500}\n";
    std::fs::write(folder.path().join("m.jsonl"), messages).unwrap();
    let file = format!("{samples}/json-match.wasm");
    let text = out(&waspmq(
        folder.path(),
        &["plugin", "run", &file, "--settings", "where=total > 100", "--messages", "m.jsonl"],
    ));
    assert_eq!(text, "Default\tm1\tdeliver\nDefault\tmessage-2\tskip\nDefault\tmessage-3\tdeliver\n");
    let candidates =
        "{\"partition\": \"a\", \"oldestAgeMs\": 5}\n{\"partition\": \"b\", \"oldestAgeMs\": 50}\n";
    std::fs::write(folder.path().join("c.jsonl"), candidates).unwrap();
    let file = format!("{samples}/oldest-first.wasm");
    let text = out(&waspmq(folder.path(), &["plugin", "run", &file, "--candidates", "c.jsonl"]));
    assert_eq!(text, "b\na\n");
    std::fs::write(folder.path().join("broken.jsonl"), "{\n").unwrap();
    let broken = waspmq(folder.path(), &["plugin", "run", &file, "--candidates", "broken.jsonl"]);
    assert!(String::from_utf8_lossy(&broken.stderr).contains("broken.jsonl:1:"));
}
