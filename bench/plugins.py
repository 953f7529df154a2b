#!/usr/bin/env python3
"""What plugins cost: bench/plugins.py WASPMQ-BINARY PLUGIN-FOLDER URL

Against a running broker with the sample plugins. Systems take turns (A B A B …), medians
are shown, and ratios only of what was measured in this run.

1. pop + ack at batch 100 (8 connections, 1-KiB JSON, 1,000 partitions), without a filter
   and with `json-match` that delivers everything;
2. the same backlog drained by `latest-only`, against reading it without a filter;
3. calls by themselves: `waspmq plugin run`;
4. a filter that matches 10 of 1,000,000, and what pops on other queues feel of it.
"""

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

binary, folder, url = sys.argv[1:4]
address = urllib.parse.urlparse(url).netloc
ROUNDS = 5


def call(connection, method, path, body=None):
    connection.request(method, path, body)
    answer = connection.getresponse()
    text = answer.read()
    return answer.status, json.loads(text) if text else None


def connect():
    return http.client.HTTPConnection(address, timeout=120)


def bench(*options):
    with tempfile.NamedTemporaryFile() as out:
        command = [binary, "bench", "--url", url, "--json", out.name, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.load(open(out.name))


def pops(query):
    options = ["--producers", "8", "--consumers", "8", "--batch", "100", "--prefill", "400000", "--seconds", "4"]
    return bench(*options, "--pop-query", query)["consumed_messages_per_s"]


def drained(query):
    """Messages per second until a group has nothing left of 300,000."""
    queue = f"drain-{time.time_ns()}"
    bench("--queue", queue, "--keep", "--producers", "8", "--consumers", "0", "--batch", "100", "--seconds", "3")
    stored = call(connect(), "GET", f"/api/v1/resources/queues/{queue}")[1]["totals"]["total"]
    path = f"/api/v1/pop/queue/{queue}?consumerGroup=g&subscriptionMode=all&batch=100&partitions=1&{query}"
    started = time.perf_counter()

    def consume():
        connection = connect()
        while True:
            status, answer = call(connection, "GET", path)
            if status == 204:
                return
            messages = answer["messages"]
            acks = [
                {"transactionId": m["transactionId"], "partitionId": m["partitionId"], "leaseId": answer["leaseId"]}
                for m in messages
            ]
            call(connection, "POST", "/api/v1/ack/batch", json.dumps({"consumerGroup": "g", "acknowledgments": acks}))

    threads = [threading.Thread(target=consume) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    rate = stored / (time.perf_counter() - started)
    call(connect(), "DELETE", f"/api/v1/resources/queues/{queue}")
    return rate


def compare(name, measure, without, with_plugin):
    a, b = [], []
    for _ in range(ROUNDS):
        a.append(measure(without))
        b.append(measure(with_plugin))
    ratios = [y / x for x, y in zip(a, b)]
    print(f"{name}: without {statistics.median(a):,.0f}/s, with {statistics.median(b):,.0f}/s, "
          f"ratio {statistics.median(ratios):.2f} (of {', '.join(f'{r:.2f}' for r in ratios)})")


def calls():
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as messages, tempfile.NamedTemporaryFile("w", suffix=".jsonl") as candidates:
        for n in range(5120):
            payload = {"stream": n, "n": n, "customer": {"id": 48213, "region": "eu"}, "total": 129.9, "note": "amber 1234 basin " * 54}
            messages.write(json.dumps(payload) + "\n")
        for n in range(100):
            candidate = {"partition": f"tenant{n % 7}:{n}", "backlog": n + 1, "oldestAgeMs": n * 13 % 101}
            candidates.write(json.dumps(candidate) + "\n")
        messages.flush(), candidates.flush()
        for name, more in [
            ("accept-all.wat", ["--messages", messages.name]),
            ("latest-only.wasm", ["--messages", messages.name]),
            ("json-match.wasm", ["--settings", "where=total >= 0", "--messages", messages.name]),
            ("oldest-first.wasm", ["--candidates", candidates.name]),
            ("priority.wasm", ["--candidates", candidates.name]),
            ("fair-share.wasm", ["--candidates", candidates.name]),
        ]:
            run = [binary, "plugin", "run", f"{folder}/{name}", *more]
            texts = [subprocess.run(run, check=True, capture_output=True, text=True).stderr.strip().splitlines()[-1] for _ in range(3)]
            print(f"{name}: {' | '.join(texts)}")


def needle():
    connection, queue = connect(), f"hay-{time.time_ns()}"
    total = 1_000_000
    for start in range(0, total, 5_000):
        items = [
            {"queue": queue, "partition": f"p{start // 5_000 % 20}", "payload": {"n": n, "hit": n % 100_000 == 99_999, "pad": "x" * 200}}
            for n in range(start, start + 5_000)
        ]
        assert call(connection, "POST", "/api/v1/push", json.dumps({"items": items}))[0] == 201
    times, over = [], threading.Event()

    def others():
        mine, turn = connect(), 0
        while not over.is_set():
            turn += 1
            other = f"other{turn % 8}"
            call(mine, "POST", "/api/v1/push", json.dumps({"items": [{"queue": other, "payload": 1}]}))
            started = time.perf_counter()
            assert call(mine, "GET", f"/api/v1/pop/queue/{other}?autoAck=true")[0] == 200
            times.append((time.time(), time.perf_counter() - started))
            time.sleep(0.002)

    thread = threading.Thread(target=others)
    thread.start()
    time.sleep(8)
    begin, found = time.time(), 0
    where = urllib.parse.quote("hit = true")
    path = f"/api/v1/pop/queue/{queue}?consumerGroup=g&subscriptionMode=all&filter=json-match&filter.where={where}&wait=true&timeout=60000&autoAck=true&batch=10"
    while found < 10:
        status, answer = call(connection, "GET", path)
        assert status in (200, 204), answer
        found += len(answer["messages"]) if answer else 0
    end = time.time()
    over.set()
    thread.join()

    def show(values):
        values = sorted(values)
        return f"p50 {values[len(values) // 2] * 1e3:.2f} ms, p99 {values[int(len(values) * 0.99)] * 1e3:.2f} ms of {len(values)}"

    print(f"10 of {total:,} found in {end - begin:.1f} s; other queues before: "
          f"{show([t for at, t in times if begin - 6 < at < begin])}; during: {show([t for at, t in times if begin < at < end])}")
    call(connection, "DELETE", f"/api/v1/resources/queues/{queue}")


calls()
needle()
compare("pop + ack, batch 100, json-match", pops, "", "filter=json-match&filter.where=" + urllib.parse.quote("total >= 0"))
compare("drained, latest-only", drained, "", "filter=latest-only")
