#!/usr/bin/env python3
"""Tests of the front under faults: other models, restarts, API keys, malformed requests, failing files."""

import argparse
import json
import os
import socket
import tempfile
import unittest
from unittest import mock

from front_fake import WAIT_S, FrontCase
from kvtier_front import state_cache as cache_module
from kvtier_front.__main__ import main, size
from kvtier_front.state_cache import INDEX, IndexTooLarge, StateCache, sync_and_hash
from kvtier_front.slots import MAX_MISSING

ONE, OTHER, THIRD = "one " * 200, "other " * 100, "third " * 100
KEY = {"Authorization": "Bearer secret"}


class Models(FrontCase):
    """Only the model that computed a state reuses it."""

    def setUp(self):
        super().setUp()
        self.second = os.path.join(self.directory, "second.gguf")
        with open(self.second, "w", encoding="ascii") as file:
            file.write("another model")

    def test_state_of_another_model_is_not_restored(self):
        self.start(identity="")
        self.ask(ONE)
        self.ask(OTHER)
        first = self.fake.model
        self.fake.restart(self.second)
        self.assertEqual((self.ask(ONE), self.fake.restores), (0, 0))
        self.assertEqual(self.counts()["server_changes"], 1)
        # The states of the first model remain for it.
        self.fake.restart(first)
        self.assertEqual((self.ask(OTHER), self.fake.restores), (len(OTHER), 1))

    def test_model_change_during_a_restore_is_noticed(self):
        self.start(identity="")
        self.ask(ONE)
        self.ask(OTHER)
        self.fake.after_restore = lambda: self.fake.restart(self.second)
        computed = self.ask(ONE)
        self.assertEqual((computed, self.counts()["restored"]), (0, 0))

    def test_model_change_during_a_save_discards_the_state(self):
        self.start(identity="")
        self.fake.after_save = lambda: self.fake.restart(self.second)
        self.ask(ONE)
        self.assertEqual((self.files(), self.counts()["saved"], self.counts()["not_saved"]), ([], 0, 1))

    def test_replaced_model_file_stops_reuse_until_a_restart(self):
        self.start(identity="")
        self.fake.restart(self.second)
        self.ask(ONE)
        with open(self.second, "a", encoding="ascii") as file:
            file.write(", a newer one")
        # The server still runs the old model, whose file is gone: there is no identity.
        self.ask(THIRD)
        self.assertEqual(self.ask(ONE), 0)
        self.assertEqual((self.counts()["saved"], self.counts()["identity"]), (1, None))
        self.fake.restart()
        self.assertEqual(self.ask(ONE), 0)
        self.assertIsNotNone(self.counts()["identity"])
        self.assertEqual(self.fake.restores, 0)

    def test_adapters_of_a_request_are_part_of_the_key(self):
        self.start()
        lora = [{"id": 0, "scale": 1.0}]
        self.ask(ONE)
        self.assertEqual(self.ask(ONE, lora=lora), 0)
        self.assertEqual(self.ask(ONE, lora=[{"scale": 1.0, "id": 0}]), len(ONE))
        self.assertEqual(self.ask(ONE, lora=[{"id": 0, "scale": 0.5}]), 0)
        self.assertEqual(self.ask(ONE), len(ONE))
        # The front has no key for less than a block, so the server must not reuse the slot either.
        self.ask("short")
        self.assertEqual(self.ask("short", lora=lora), 0)
        self.assertEqual(self.ask("short"), 0)

    def test_clients_cannot_change_adapters(self):
        self.start()
        self.assertEqual(self.request("POST", "/lora-adapters", "[]")[0], 403)
        for path, body in [("/infill", {"lora": [{"id": 0, "scale": 1}]}),
                           ("/completion", {"prompt": ["a", "b"], "lora": [{"id": 0, "scale": 1}]})]:
            self.assertEqual(self.request("POST", path, json.dumps(body))[0], 400)
        self.assertEqual(self.request("POST", "/infill", "{\"lora\": [1], }")[0], 400)
        self.assertEqual([path for path in self.fake.served if not path.startswith("/slots")], [])
        self.assertEqual(self.request("POST", "/infill", "{\"lora\": []}")[0], 200)

    def test_adapters_of_the_server_change_the_identity(self):
        self.start()
        self.ask(ONE)
        before = self.counts()["identity"]
        for scale, is_marked in [(1.0, True), (0.5, False), (0.25, False)]:
            self.fake.adapters = [{"id": 0, "path": self.second, "scale": scale}]
            self.fake.restart(is_marked=is_marked)
            self.assertEqual(self.ask(ONE), 0)
            self.assertNotEqual(self.counts()["identity"], before)
            before = self.counts()["identity"]

    def test_start_fails_without_an_identity(self):
        self.start()
        self.fake.model = "relative.gguf"
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        arguments = ["--server", f"http://127.0.0.1:{self.fake.server_address[1]}", "--slots", folder.name]
        with self.assertRaisesRegex(SystemExit, "--identity"):
            main(arguments)


class Restarts(FrontCase):
    """The server restarts, and the front keeps running."""

    def check_comes_back(self, is_marked):
        self.start(slots=2)
        if not is_marked:
            self.fake.marker = "pinned"
        self.ask(ONE)
        self.ask(OTHER)
        self.fake.restart(is_marked=is_marked)
        found = [self.ask(ONE), self.ask(OTHER), self.ask(THIRD), self.ask(ONE)]
        self.assertFalse(self.counts()["in_vain"] or self.counts()["only_whole"])
        return found

    def test_slots_of_a_marked_new_process_are_empty(self):
        self.assertEqual(self.check_comes_back(True), [len(ONE), len(OTHER), 0, len(ONE)])

    def test_restart_without_a_marker_is_noticed_by_a_request(self):
        # The first request finds its slot empty; then the front treats all slots as empty.
        self.assertEqual(self.check_comes_back(False), [0, len(OTHER), 0, len(ONE)])

    def test_slot_count_is_part_of_the_identity(self):
        self.start(slots=2)
        self.ask(ONE)
        # A state is usable with the slot count it was saved with.
        for count, expected in [(1, 0), (3, 0), (2, len(ONE)), (3, len(ONE))]:
            self.fake.slots = [""] * count
            self.fake.restart()
            self.assertEqual(self.ask(ONE), expected)
            self.assertEqual([slot.number for slot in self.front.slots.all], list(range(count)))

    def test_server_error_resets_the_slots(self):
        self.start()
        self.fake.marker = None
        self.ask(ONE)
        before = self.counts()["server_changes"]
        self.fake.fails = 500
        self.assertEqual(self.request("POST", "/completion", json.dumps({"prompt": OTHER}))[0], 500)
        self.fake.fails = 0
        self.wait_for_saves()
        self.assertEqual((self.ask(ONE), self.counts()["server_changes"]), (len(ONE), before + 1))

    def test_only_status_400_drops_a_state(self):
        self.start()
        self.ask(ONE)
        self.ask(OTHER)
        for status in [401, 500, 502, 503]:
            self.fake.restore_status = status
            self.assertEqual(self.ask(ONE), 0)
            self.fake.restore_status = 0
            self.assertEqual(self.counts()["lost"], 0, status)
            self.assertEqual(self.ask(OTHER), len(OTHER))
        self.fake.restore_status = 400
        self.ask(ONE)
        self.assertEqual((self.counts()["lost"], self.counts()["restore_failed"]), (1, 5))


class Keys(FrontCase):
    """Each client must send the API key itself."""

    def test_requests_without_the_key_get_401(self):
        self.start(key="secret")
        body = json.dumps({"prompt": ONE})
        before = len(self.fake.authorizations)
        for headers in [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s\u00e9cret"},
                        {"X-Api-Key": "wrong"}, {"Authorization": "Bearer wrong", "X-Api-Key": "secret"}]:
            self.assertEqual(self.request("POST", "/completion", body, headers)[0], 401)
        self.assertEqual(self.request("GET", "/kvtier")[0], 401)
        self.assertEqual(len(self.fake.authorizations), before)
        for method, path, sent in [("GET", "/props", None), ("POST", "/tokenize", "{}")]:
            self.assertEqual(self.request(method, path, sent)[0], 401)
        self.assertEqual([seen for _, seen in self.fake.authorizations[before:]], [None, None])

    def test_requests_with_the_key_are_served(self):
        self.start(key="secret")
        for name in ["Authorization", "authorization", "AUTHORIZATION"]:
            status, _ = self.request("POST", "/completion", json.dumps({"prompt": ONE}),
                                     {name: "Bearer secret"})
            self.wait_for_saves()
            self.assertEqual(status, 200)
            self.assertEqual(self.request("POST", "/tokenize", "{}", {name: "Bearer secret"})[0], 200)
        self.assertEqual(json.loads(self.request("GET", "/kvtier", None, KEY)[1])["saved"], 3)
        self.assertTrue(all(seen == ["Bearer secret"] for _, seen in self.fake.authorizations))

    def test_start_fails_when_the_server_refuses_the_key(self):
        self.start(key="secret")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        arguments = ["--server", f"http://127.0.0.1:{self.fake.server_address[1]}", "--slots", folder.name]
        with self.assertRaisesRegex(SystemExit, "--api-key-env"):
            main(arguments)


class Wire(FrontCase):
    """Malformed and hostile requests."""

    def raw(self, text):
        with socket.create_connection(self.front.server_address[:2], timeout=WAIT_S) as connection:
            connection.sendall(text.encode("latin-1"))
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
        return answer

    def test_slot_paths_are_refused_in_every_spelling(self):
        self.start()
        for path in ["/slots/0", "/%73lots/0", "/%2573lots/0", "//slots/0", "/./slots/0", "/x/../slots/0",
                     "/Slots/0", "/slots%2f0", "/slots/0/", "/slots/0;x", "\\slots/0", "/slots/0#x",
                     "/props", "http://x/slots/0", "/models/load", "/tools", "/cors-proxy", "/completion/",
                     "/tokenize%20"]:
            status, _ = self.request("POST", path + "?action=erase", "{}")
            self.assertEqual(status, 403, path)
        for path in ["/%73lots", "/x//slots", "/./x", "/x/../slots", "http://x/slots", "/x%00"]:
            self.assertEqual(self.request("GET", path)[0], 403, path)
        self.assertEqual(self.fake.served, [])
        self.assertEqual(self.request("GET", "/_app/some-file.1.js?x=%20")[0], 200)

    def test_ambiguous_body_lengths_are_refused(self):
        self.start()
        body = "{\"prompt\": \"x\"}"
        for lengths in ["Content-Length: \u00b2", f"Content-Length: {len(body)}\r\nContent-Length: 3",
                        f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked",
                        "Content-Length: -1", "Content-Length: " + "9" * 5000]:
            answer = self.raw(f"POST /completion HTTP/1.1\r\nHost: x\r\n{lengths}\r\n\r\n{body}")
            self.assertTrue(answer.startswith(b"HTTP/1.1 411 "), (lengths, answer))
        inner = "POST /slots/0?action=erase HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
        for length in [f"Content-Length: {len(inner)}", "Transfer-Encoding: chunked"]:
            for method in ["GET", "HEAD", "OPTIONS"]:
                answer = self.raw(f"{method} /props HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n{inner}")
                self.assertTrue(answer.startswith(b"HTTP/1.1 400 "), answer)
                self.assertEqual(answer.count(b"HTTP/1.1"), 1)
        with self.assertRaises(argparse.ArgumentTypeError):
            size("\u00b2")

    def test_stream_to_http_1_0_client_is_not_chunked(self):
        self.start()
        body = json.dumps({"prompt": ONE, "stream": True})
        head = f"Content-Length: {len(body)}\r\nConnection: keep-alive\r\n\r\n"
        answer = self.raw(f"POST /completion HTTP/1.0\r\n{head}{body}")
        headers, _, content = answer.partition(b"\r\n\r\n")
        self.assertNotIn(b"chunked", headers)
        self.assertTrue(content.startswith(b"data: "), content)
        self.wait_for_saves()

    def test_invalid_header_fails_only_its_request(self):
        self.start()
        self.ask(ONE)
        self.assertEqual(self.raw("GET /props?\x01 HTTP/1.1\r\nHost: x\r\n\r\n")[:13], b"HTTP/1.1 400 ")
        self.assertEqual((self.ask(ONE), self.counts()["in_slot"]), (len(ONE), 1))


class Files(FrontCase):
    """The directory of states and its index."""

    def test_failed_index_write_does_not_fail_a_request(self):
        self.start()
        with mock.patch.object(cache_module.os, "replace", side_effect=OSError(28, "no space")):
            self.ask(ONE)
            self.ask(OTHER)
            self.assertEqual(self.ask(ONE), len(ONE))
        self.assertFalse(self.front.slots.all[0].is_busy)
        self.assertEqual(self.counts()["restored"], 1)

    def test_slot_is_released_after_any_error(self):
        self.start()
        self.ask(ONE)
        self.ask(OTHER)
        for name in ["touch", "find_longest", "add", "is_intact"]:
            with mock.patch.object(self.front.cache, name, side_effect=RuntimeError("a defect")):
                try:
                    self.request("POST", "/completion", json.dumps({"prompt": ONE}))
                except OSError:
                    pass
                self.wait_for_saves()
        self.assertEqual(self.ask(OTHER), len(OTHER))

    def test_hanging_save_is_abandoned(self):
        self.start()
        call = self.front.upstream.call

        def call_with_a_limit(method, path, value=None):
            # A short limit for the hanging save only; other calls may be slow on a busy machine.
            self.front.upstream.call_s = 0.2 if path.endswith("action=save") else WAIT_S
            return call(method, path, value)

        self.fake.hangs = True
        self.addCleanup(self.fake.resume.set)
        with mock.patch.object(self.front.upstream, "call", side_effect=call_with_a_limit):
            self.ask(ONE)
        self.front.upstream.call_s = WAIT_S
        self.assertEqual((self.counts()["saved"], self.counts()["not_saved"]), (0, 1))
        self.fake.hangs = False
        # The state of the server is unknown: no slot is reused.
        self.assertEqual([self.ask(ONE), self.ask(ONE)], [0, len(ONE)])

    def test_uses_are_written_at_close_only(self):
        self.start()
        self.ask(ONE)
        self.ask(OTHER)
        path = os.path.join(self.directory, INDEX)
        cache = self.front.cache
        state = next(iter(cache.states.values()))
        before = os.stat(path).st_mtime_ns, os.stat(path).st_ino
        cache.touch(state)
        self.assertEqual((os.stat(path).st_mtime_ns, os.stat(path).st_ino), before)
        cache.close()
        with open(path, encoding="ascii") as file:
            names = [one["name"] for one in json.load(file)["states"]]
        self.assertEqual(names[-1], state.name)

    def test_files_are_verified_once_after_a_start(self):
        self.start()
        self.ask(ONE)
        path = os.path.join(self.directory, self.files()[0])
        with open(path, "r+b") as file:
            file.write(b"X")
        self.start()
        self.fake.restart()
        self.assertEqual((self.counts()["found_again"], self.ask(ONE), self.fake.restores), (1, 0, 0))
        self.assertEqual(self.counts()["lost"], 1)
        self.start()
        self.fake.restart()
        with mock.patch.object(cache_module, "sync_and_hash", side_effect=OSError(24, "too many open files")):
            self.assertEqual((self.ask(ONE), self.counts()["lost"]), (0, 0))
        self.fake.restart()
        with mock.patch.object(cache_module, "sync_and_hash", side_effect=sync_and_hash) as hashed:
            self.assertEqual(self.ask(ONE), len(ONE))
            first = hashed.call_count
            self.ask(OTHER)
            self.ask(ONE)
        # One verification of the old state, and one hash of each saved state.
        self.assertEqual((first, hashed.call_count), (2, 4))

    def test_wrong_directory_stops_saving(self):
        wrong = tempfile.TemporaryDirectory()
        self.addCleanup(wrong.cleanup)
        self.start(directory=wrong.name)
        for number in range(MAX_MISSING + 3):
            self.ask(f"{number} " * 200)
        self.assertEqual((len(self.files()), self.counts()["not_saved"]), (MAX_MISSING, MAX_MISSING))

    def test_too_large_index_is_refused_without_deleting_states(self):
        self.start()
        self.ask(ONE)
        with mock.patch.object(cache_module, "MAX_INDEX_BYTES", 10):
            with self.assertRaises(IndexTooLarge):
                StateCache(self.directory, 1 << 20)
        self.assertEqual(len(self.files()), 1)

    def test_index_blocks_are_bounded(self):
        with mock.patch.object(cache_module, "MAX_ALL_BLOCKS", 20):
            self.start()
            for number in range(6):
                self.ask(f"{number} " * 200)
                self.assertLessEqual(self.front.cache.used_blocks, 20)
        self.assertEqual((self.counts()["evicted"], len(self.files())), (3, 3))
        most = 28 * cache_module.MAX_ALL_BLOCKS + 200 * cache_module.MAX_STATES
        self.assertLess(most, cache_module.MAX_INDEX_BYTES)


if __name__ == "__main__":
    unittest.main()
