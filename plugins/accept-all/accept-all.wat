;; The smallest possible plugin: a filter that delivers everything. It needs no
;; toolchain: the broker reads this text.
;;
;; A component wraps one core module. `init` and `filter` are lifted from its exports;
;; the host writes their arguments into its memory through `realloc`.
(component
  (core module $filter
    (memory (export "memory") 1)
    ;; Where the next allocation goes; everything is forgotten when a call begins.
    (global $next (mut i32) (i32.const 1024))

    (func $realloc (export "realloc") (param $old i32) (param $old-size i32) (param $align i32) (param $size i32) (result i32)
      (local $at i32) (local $pages i32)
      (local.set $at
        (i32.and
          (i32.add (global.get $next) (i32.sub (local.get $align) (i32.const 1)))
          (i32.sub (i32.const 0) (local.get $align))))
      (global.set $next (i32.add (local.get $at) (local.get $size)))
      ;; Pages that are wanted beyond those that there are.
      (local.set $pages
        (i32.sub
          (i32.shr_u (i32.add (global.get $next) (i32.const 65535)) (i32.const 16))
          (memory.size)))
      (if (i32.gt_s (local.get $pages) (i32.const 0))
        (then (if (i32.eq (memory.grow (local.get $pages)) (i32.const -1)) (then (unreachable)))))
      (local.get $at))

    ;; result<_, string>: all zeros is ok.
    (func (export "init") (param i32 i32) (result i32)
      (memory.fill (i32.const 0) (i32.const 0) (i32.const 16))
      (i32.const 0))
    ;; What the arguments took is free again when the result has been read.
    (func (export "done") (param i32) (global.set $next (i32.const 1024)))

    ;; context: queue, partition, consumer-group (pointer and length each), now-ms, attempt,
    ;; more; then the messages (pointer and length).
    (func (export "filter")
      (param i32 i32 i32 i32 i32 i32 i64 i32 i32) (param $messages i32) (param $count i32) (result i32)
      (local $verdicts i32) (local $bytes i32)
      ;; A verdict is 12 bytes; all zeros is `deliver`.
      (local.set $bytes (i32.mul (local.get $count) (i32.const 12)))
      (local.set $verdicts (call $realloc (i32.const 0) (i32.const 0) (i32.const 4) (local.get $bytes)))
      (memory.fill (local.get $verdicts) (i32.const 0) (local.get $bytes))
      (memory.fill (i32.const 0) (i32.const 0) (i32.const 16))
      ;; ok(list): the list's pointer and length behind the tag.
      (i32.store (i32.const 4) (local.get $verdicts))
      (i32.store (i32.const 8) (local.get $count))
      (i32.const 0)))

  (core instance $i (instantiate $filter))
  (alias core export $i "memory" (core memory $memory))
  (alias core export $i "realloc" (core func $realloc))
  (alias core export $i "done" (core func $done))
  (alias core export $i "init" (core func $core-init))
  (alias core export $i "filter" (core func $core-filter))

  ;; The core functions, lifted to the interface's types.
  (type $context (record
    (field "queue" string) (field "partition" string) (field "consumer-group" string)
    (field "now-ms" u64) (field "attempt" u32) (field "more" bool)))
  (type $message (record
    (field "id" string) (field "transaction-id" string) (field "created-ms" u64) (field "payload" (list u8))))
  (type $verdict (variant (case "deliver") (case "skip") (case "hold" u32) (case "dead-letter" string)))
  (func $init (param "settings" (list (tuple string string))) (result (result (error string)))
    (canon lift (core func $core-init) (memory $memory) (realloc $realloc) (post-return $done)))
  (func $judge
    (param "context" $context) (param "messages" (list $message)) (result (result (list $verdict) (error string)))
    (canon lift (core func $core-filter) (memory $memory) (realloc $realloc) (post-return $done)))

  ;; What an interface exports may only speak of types that it exports as well: this inner
  ;; component takes everything in, and gives it out again under the interface's names.
  (component $interface
    (import "init" (func $init (param "settings" (list (tuple string string))) (result (result (error string)))))
    (type $context' (record
      (field "queue" string) (field "partition" string) (field "consumer-group" string)
      (field "now-ms" u64) (field "attempt" u32) (field "more" bool)))
    (import "type-context" (type $context-in (eq $context')))
    (type $message' (record
      (field "id" string) (field "transaction-id" string) (field "created-ms" u64) (field "payload" (list u8))))
    (import "type-message" (type $message-in (eq $message')))
    (type $verdict' (variant (case "deliver") (case "skip") (case "hold" u32) (case "dead-letter" string)))
    (import "type-verdict" (type $verdict-in (eq $verdict')))
    (import "filter" (func $judge
      (param "context" $context-in) (param "messages" (list $message-in))
      (result (result (list $verdict-in) (error string)))))

    (export $context "context" (type $context'))
    (export $message "message" (type $message'))
    (export $verdict "verdict" (type $verdict'))
    (export "init" (func $init)
      (func (param "settings" (list (tuple string string))) (result (result (error string)))))
    (export "filter" (func $judge)
      (func
        (param "context" $context) (param "messages" (list $message))
        (result (result (list $verdict) (error string))))))

  (instance $exported (instantiate $interface
    (with "init" (func $init))
    (with "type-context" (type $context))
    (with "type-message" (type $message))
    (with "type-verdict" (type $verdict))
    (with "filter" (func $judge))))
  (export "waspmq:plugin/message-filter@1.0.0" (instance $exported)))
