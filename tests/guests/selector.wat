(component
  {{imports}}
  (core module $selector
    (memory (export "memory") 1)
    (global $next (mut i32) (i32.const 1024))
    (func $realloc (export "realloc") (param $old i32) (param $old-size i32) (param $align i32) (param $size i32) (result i32)
      (local $at i32) (local $pages i32)
      (local.set $at
        (i32.and (i32.add (global.get $next) (i32.sub (local.get $align) (i32.const 1)))
                 (i32.sub (i32.const 0) (local.get $align))))
      (global.set $next (i32.add (local.get $at) (local.get $size)))
      (local.set $pages (i32.sub (i32.shr_u (i32.add (global.get $next) (i32.const 65535)) (i32.const 16)) (memory.size)))
      (if (i32.gt_s (local.get $pages) (i32.const 0))
        (then (if (i32.eq (memory.grow (local.get $pages)) (i32.const -1)) (then (unreachable)))))
      (local.get $at))
    (func (export "init") (param i32 i32) (result i32)
      (memory.fill (i32.const 0) (i32.const 0) (i32.const 16))
      (i32.const 0))
    (func (export "done") (param i32) (global.set $next (i32.const 1024)))
    {{module}}
    ;; ok(list of `count` indices), which `answer` wrote at 1024.
    (func $ok (param $at i32) (param $count i32) (result i32)
      (memory.fill (i32.const 0) (i32.const 0) (i32.const 16))
      (i32.store (i32.const 4) (local.get $at))
      (i32.store (i32.const 8) (local.get $count))
      (i32.const 0))
    (func (export "select")
      (param i32 i32 i32 i32) (param $batch i32) (param $partitions i32) (param i64) (param $hints i32) (param $hint-count i32)
      (param $candidates i32) (param $count i32) (result i32)
      (local $at i32) (local $n i32)
      {{select}}))
  (core instance $i (instantiate $selector))
  (alias core export $i "memory" (core memory $memory))
  (alias core export $i "realloc" (core func $realloc))
  (alias core export $i "done" (core func $done))
  (alias core export $i "init" (core func $core-init))
  (alias core export $i "select" (core func $core-select))
  (type $request (record
    (field "queue" string) (field "consumer-group" string) (field "batch" u32) (field "partitions" u32)
    (field "now-ms" u64) (field "hints" (list (tuple string string)))))
  (type $candidate (record
    (field "queue" string) (field "partition" string) (field "backlog" u64) (field "oldest-age-ms" u64)
    (field "since-served-ms" (option u64)) (field "retries" u32) (field "queue-priority" s32)))
  (func $init (param "settings" (list (tuple string string))) (result (result (error string)))
    (canon lift (core func $core-init) (memory $memory) (realloc $realloc) (post-return $done)))
  (func $choose
    (param "request" $request) (param "candidates" (list $candidate)) (result (result (list u32) (error string)))
    (canon lift (core func $core-select) (memory $memory) (realloc $realloc) (post-return $done)))
  (component $interface
    (import "init" (func $init (param "settings" (list (tuple string string))) (result (result (error string)))))
    (type $request' (record
      (field "queue" string) (field "consumer-group" string) (field "batch" u32) (field "partitions" u32)
      (field "now-ms" u64) (field "hints" (list (tuple string string)))))
    (import "type-request" (type $request-in (eq $request')))
    (type $candidate' (record
      (field "queue" string) (field "partition" string) (field "backlog" u64) (field "oldest-age-ms" u64)
      (field "since-served-ms" (option u64)) (field "retries" u32) (field "queue-priority" s32)))
    (import "type-candidate" (type $candidate-in (eq $candidate')))
    (import "select" (func $choose
      (param "request" $request-in) (param "candidates" (list $candidate-in)) (result (result (list u32) (error string)))))
    (export $request "request" (type $request'))
    (export $candidate "candidate" (type $candidate'))
    (export "init" (func $init)
      (func (param "settings" (list (tuple string string))) (result (result (error string)))))
    (export "select" (func $choose)
      (func (param "request" $request) (param "candidates" (list $candidate)) (result (result (list u32) (error string))))))
  (instance $exported (instantiate $interface
    (with "init" (func $init)) (with "type-request" (type $request)) (with "type-candidate" (type $candidate))
    (with "select" (func $choose))))
  (export "waspmq:plugin/candidate-selector@1.0.0" (instance $exported)))
