//! Small guests for tests, made of text: the sample `accept-all` with other functions.

/// The filter's parts that a test can choose.
#[derive(Default)]
pub struct FilterGuest<'a> {
    /// Imports of the component.
    pub imports: &'a str,
    /// How the core module is instantiated with them.
    pub with: &'a str,
    /// Further core functions and imports, at the start of the module.
    pub module: &'a str,
    /// Body of `init`; by default it is content.
    pub init: &'a str,
    /// Body of `filter`; by default everything is delivered. `$messages` and `$count` are its
    /// parameters, `$verdicts`, `$bytes`, `$n`, `$at` its locals, `(call $ok (verdicts) (count))` its answer.
    pub filter: &'a str,
}

impl FilterGuest<'_> {
    pub fn text(&self) -> String {
        let sample = include_str!("../../plugins/accept-all/accept-all.wat");
        let (head, rest) = sample.split_once("    ;; result<_, string>").expect("the sample has this line");
        let (_, tail) = rest.split_once("  (core instance $i").expect("and this one");
        let init = if self.init.is_empty() {
            "(memory.fill (i32.const 0) (i32.const 0) (i32.const 16)) (i32.const 0)"
        } else {
            self.init
        };
        let filter = if self.filter.is_empty() {
            "(local.set $bytes (i32.mul (local.get $count) (i32.const 12)))
             (local.set $verdicts (call $realloc (i32.const 0) (i32.const 0) (i32.const 4) (local.get $bytes)))
             (memory.fill (local.get $verdicts) (i32.const 0) (local.get $bytes))
             (call $ok (local.get $verdicts) (local.get $count))"
        } else {
            self.filter
        };
        let head = head
            .replace("(component\n", &format!("(component\n{}\n", self.imports))
            .replace("(core module $filter\n", &format!("(core module $filter\n{}\n", self.module));
        format!(
            r#"{head}
    (func $ok (param $at i32) (param $count i32) (result i32)
      (memory.fill (i32.const 0) (i32.const 0) (i32.const 16))
      (i32.store (i32.const 4) (local.get $at))
      (i32.store (i32.const 8) (local.get $count))
      (i32.const 0))
    (func (export "init") (param i32 i32) (result i32) {init})
    (func (export "done") (param i32) (global.set $next (i32.const 1024)))
    (func $filter (export "filter")
      (param i32 i32 i32 i32 i32 i32) (param $now i64) (param $attempt i32) (param $more i32)
      (param $messages i32) (param $count i32) (result i32)
      (local $verdicts i32) (local $bytes i32) (local $n i32) (local $at i32) (local $out i32)
      {filter}))
  (core instance $i{}"#,
            tail.replacen("(instantiate $filter)", &format!("(instantiate $filter {})", self.with), 1)
        )
    }
}

/// A selector with this body of `select`: `$candidates`, `$count`, locals `$at`, `$n`; `(call $ok (at) (count))`.
pub fn selector(module: &str, body: &str) -> String {
    include_str!("../guests/selector.wat")
        .replace("{{imports}}", "")
        .replace("{{module}}", module)
        .replace("{{select}}", body)
}

/// Judges by the payload, a JSON text: `"d…` deliver, `"s…` skip, `"x…` dead-letter, `"h…` hold until the
/// message is 300 ms old, then deliver.
pub const BY_LETTER: &str = r#"
    (local.set $bytes (i32.mul (local.get $count) (i32.const 12)))
    (local.set $verdicts (call $realloc (i32.const 0) (i32.const 0) (i32.const 4) (local.get $bytes)))
    (memory.fill (local.get $verdicts) (i32.const 0) (local.get $bytes))
    (i32.store (i32.const 512) (i32.const 0x656c7572)) ;; "rule"
    (block $end (loop $each
      (br_if $end (i32.ge_u (local.get $n) (local.get $count)))
      (local.set $at (i32.add (local.get $messages) (i32.mul (local.get $n) (i32.const 32))))
      (local.set $out (i32.add (local.get $verdicts) (i32.mul (local.get $n) (i32.const 12))))
      (local.set $n (i32.add (local.get $n) (i32.const 1)))
      (if (i32.eq (i32.load8_u offset=1 (i32.load offset=24 (local.get $at))) (i32.const 0x73))
        (then (i32.store8 (local.get $out) (i32.const 1))))
      (if (i32.eq (i32.load8_u offset=1 (i32.load offset=24 (local.get $at))) (i32.const 0x78))
        (then (i32.store8 (local.get $out) (i32.const 3))
              (i32.store offset=4 (local.get $out) (i32.const 512))
              (i32.store offset=8 (local.get $out) (i32.const 4))))
      (if (i32.and (i32.eq (i32.load8_u offset=1 (i32.load offset=24 (local.get $at))) (i32.const 0x68))
                   (i64.lt_u (local.get $now) (i64.add (i64.load offset=16 (local.get $at)) (i64.const 300))))
        (then (i32.store8 (local.get $out) (i32.const 2))
              (i32.store offset=4 (local.get $out) (i32.const 50))))
      (br $each)))
    (call $ok (local.get $verdicts) (local.get $count))"#;
