#!/usr/bin/env python3
"""What must not happen: states of another model, of other clients' making or of nobody, slots that are lost,
keys that are given away."""

import argparse
import json
import os
import socket
import tempfile
import unittest
from unittest import mock

from front_fake import WAIT_S, FrontCase
from kvtier_front import shelf as shelf_module
from kvtier_front.__main__ import main, size
from kvtier_front.shelf import INDEX, IndexTooLarge, Shelf, settle
from kvtier_front.slots import MOST_MISSING

ONE, OTHER, THIRD = "one " * 200, "other " * 100, "third " * 100
KEY = {"Authorization": "Bearer secret"}


class Models(FrontCase):
    """A state is used by the model that made it, and by no other."""

    def setUp(self):
        super().setUp()
        self.second = os.path.join(self.directory, "second.gguf")
        with open(self.second, "w", encoding="ascii") as file:
            file.write("another model")

    def test_a_server_that_comes_back_with_another_model(self):
        self.start(identity="")
        self.ask(ONE)
        self.ask(OTHER)
        first = self.fake.model
        self.fake.restart(self.second)
        self.assertEqual((self.ask(ONE), self.fake.restores), (0, 0))
        self.assertEqual(self.counts()["server_changes"], 1)
        # What the first has left is still there for the first.
        self.fake.restart(first)
        self.assertEqual((self.ask(OTHER), self.fake.restores), (len(OTHER), 1))

    def test_one_that_comes_between_the_look_and_the_restore(self):
        self.start(identity="")
        self.ask(ONE)
        self.ask(OTHER)
        self.fake.after_restore = lambda: self.fake.restart(self.second)
        computed = self.ask(ONE)
        self.assertEqual((computed, self.counts()["restored"]), (0, 0))

    def test_one_that_comes_before_a_save(self):
        self.start(identity="")
        self.fake.after_save = lambda: self.fake.restart(self.second)
        self.ask(ONE)
        self.assertEqual((self.files(), self.counts()["saved"], self.counts()["not_saved"]), ([], 0, 1))

    def test_a_file_that_is_replaced_under_the_server(self):
        self.start(identity="")
        self.fake.restart(self.second)
        self.ask(ONE)
        with open(self.second, "a", encoding="ascii") as file:
            file.write(", a newer one")
        # In memory is still what was there; nobody knows what it is called.
        self.ask(THIRD)
        self.assertEqual(self.ask(ONE), 0)
        self.assertEqual((self.counts()["saved"], self.counts()["identity"]), (1, None))
        self.fake.restart()
        self.assertEqual(self.ask(ONE), 0)
        self.assertIsNotNone(self.counts()["identity"])
        self.assertEqual(self.fake.restores, 0)

    def test_adapters_of_a_request(self):
        self.start()
        lora = [{"id": 0, "scale": 1.0}]
        self.ask(ONE)
        self.assertEqual(self.ask(ONE, lora=lora), 0)
        self.assertEqual(self.ask(ONE, lora=[{"scale": 1.0, "id": 0}]), len(ONE))
        self.assertEqual(self.ask(ONE, lora=[{"id": 0, "scale": 0.5}]), 0)
        self.assertEqual(self.ask(ONE), len(ONE))
        # Of less than a block the front knows nothing, and the server must not reuse it either.
        self.ask("short")
        self.assertEqual(self.ask("short", lora=lora), 0)
        self.assertEqual(self.ask("short"), 0)

    def test_adapters_are_not_the_clients_to_change(self):
        self.start()
        self.assertEqual(self.request("POST", "/lora-adapters", "[]")[0], 403)
        for path, body in [("/infill", {"lora": [{"id": 0, "scale": 1}]}),
                           ("/completion", {"prompt": ["a", "b"], "lora": [{"id": 0, "scale": 1}]})]:
            self.assertEqual(self.request("POST", path, json.dumps(body))[0], 400)
        self.assertEqual(self.request("POST", "/infill", "{\"lora\": [1], }")[0], 400)
        self.assertEqual([path for path in self.fake.served if not path.startswith("/slots")], [])
        self.assertEqual(self.request("POST", "/infill", "{\"lora\": []}")[0], 200)

    def test_adapters_of_the_server_are_a_part_of_its_model(self):
        self.start()
        self.ask(ONE)
        before = self.counts()["identity"]
        for scale, is_marked in [(1.0, True), (0.5, False), (0.25, False)]:
            self.fake.adapters = [{"id": 0, "path": self.second, "scale": scale}]
            self.fake.restart(is_marked=is_marked)
            self.assertEqual(self.ask(ONE), 0)
            self.assertNotEqual(self.counts()["identity"], before)
            before = self.counts()["identity"]

    def test_does_not_start_where_models_cannot_be_told_apart(self):
        self.start()
        self.fake.model = "relative.gguf"
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        words = ["--server", f"http://127.0.0.1:{self.fake.server_address[1]}", "--slots", folder.name]
        with self.assertRaisesRegex(SystemExit, "--identity"):
            main(words)


class Restarts(FrontCase):
    """The server goes and comes, and the front goes on."""

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

    def test_slots_of_a_new_process_are_empty(self):
        self.assertEqual(self.check_comes_back(True), [len(ONE), len(OTHER), 0, len(ONE)])

    def test_servers_without_a_mark_are_found_out(self):
        # The first request finds its slot empty; after it, nothing is taken for granted.
        self.assertEqual(self.check_comes_back(False), [0, len(OTHER), 0, len(ONE)])

    def test_fewer_and_more_slots(self):
        self.start(slots=2)
        self.ask(ONE)
        # States are of use to as many slots as they are from.
        for count, expected in [(1, 0), (3, 0), (2, len(ONE)), (3, len(ONE))]:
            self.fake.slots = [""] * count
            self.fake.restart()
            self.assertEqual(self.ask(ONE), expected)
            self.assertEqual([slot.number for slot in self.front.slots.all], list(range(count)))

    def test_a_failure_inside_the_server(self):
        self.start()
        self.fake.marker = None
        self.ask(ONE)
        before = self.counts()["server_changes"]
        self.fake.fails = 500
        self.assertEqual(self.request("POST", "/completion", json.dumps({"prompt": OTHER}))[0], 500)
        self.fake.fails = 0
        self.settled()
        self.assertEqual((self.ask(ONE), self.counts()["server_changes"]), (len(ONE), before + 1))

    def test_only_a_state_that_the_server_cannot_use_is_lost(self):
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
    """A key is the client's to show."""

    def test_without_it_nothing_is_had(self):
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

    def test_with_it_all_is_had(self):
        self.start(key="secret")
        for name in ["Authorization", "authorization", "AUTHORIZATION"]:
            status, _ = self.request("POST", "/completion", json.dumps({"prompt": ONE}),
                                     {name: "Bearer secret"})
            self.settled()
            self.assertEqual(status, 200)
            self.assertEqual(self.request("POST", "/tokenize", "{}", {name: "Bearer secret"})[0], 200)
        self.assertEqual(json.loads(self.request("GET", "/kvtier", None, KEY)[1])["saved"], 3)
        self.assertTrue(all(seen == ["Bearer secret"] for _, seen in self.fake.authorizations))

    def test_does_not_wait_for_a_server_that_wants_another(self):
        self.start(key="secret")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        words = ["--server", f"http://127.0.0.1:{self.fake.server_address[1]}", "--slots", folder.name]
        with self.assertRaisesRegex(SystemExit, "--api-key-env"):
            main(words)


class Wire(FrontCase):
    """What comes in by the wire."""

    def raw(self, text):
        with socket.create_connection(self.front.server_address[:2], timeout=WAIT_S) as connection:
            connection.sendall(text.encode("latin-1"))
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
        return answer

    def test_slots_are_the_front_s_by_whatever_name(self):
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

    def test_bodies_and_their_lengths(self):
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

    def test_streams_to_old_clients_end_with_the_connection(self):
        self.start()
        body = json.dumps({"prompt": ONE, "stream": True})
        head = f"Content-Length: {len(body)}\r\nConnection: keep-alive\r\n\r\n"
        answer = self.raw(f"POST /completion HTTP/1.0\r\n{head}{body}")
        headers, _, content = answer.partition(b"\r\n\r\n")
        self.assertNotIn(b"chunked", headers)
        self.assertTrue(content.startswith(b"data: "), content)
        self.settled()

    def test_headers_that_cannot_be_passed_on_harm_nobody(self):
        self.start()
        self.ask(ONE)
        self.assertEqual(self.raw("GET /props?\x01 HTTP/1.1\r\nHost: x\r\n\r\n")[:13], b"HTTP/1.1 400 ")
        self.assertEqual((self.ask(ONE), self.counts()["in_slot"]), (len(ONE), 1))


class Files(FrontCase):
    """The directory, and what is in it."""

    def test_no_request_fails_for_the_index(self):
        self.start()
        with mock.patch.object(shelf_module.os, "replace", side_effect=OSError(28, "no space")):
            self.ask(ONE)
            self.ask(OTHER)
            self.assertEqual(self.ask(ONE), len(ONE))
        self.assertFalse(self.front.slots.all[0].is_busy)
        self.assertEqual(self.counts()["restored"], 1)

    def test_a_slot_is_given_back_whatever_happens(self):
        self.start()
        self.ask(ONE)
        self.ask(OTHER)
        for name in ["used", "best", "add", "is_whole"]:
            with mock.patch.object(self.front.shelf, name, side_effect=RuntimeError("a defect")):
                try:
                    self.request("POST", "/completion", json.dumps({"prompt": ONE}))
                except OSError:
                    pass
                self.settled()
        self.assertEqual(self.ask(OTHER), len(OTHER))

    def test_a_save_that_does_not_end(self):
        self.start()
        call = self.front.upstream.call

        def call_with_a_limit(method, path, value=None):
            # Short for the save, which does not end; any other call may be as slow as the machine.
            self.front.upstream.call_s = 0.2 if path.endswith("action=save") else WAIT_S
            return call(method, path, value)

        self.fake.hangs = True
        self.addCleanup(self.fake.goes_on.set)
        with mock.patch.object(self.front.upstream, "call", side_effect=call_with_a_limit):
            self.ask(ONE)
        self.front.upstream.call_s = WAIT_S
        self.assertEqual((self.counts()["saved"], self.counts()["not_saved"]), (0, 1))
        self.fake.hangs = False
        # What became of the server is not known: nothing of it is believed.
        self.assertEqual([self.ask(ONE), self.ask(ONE)], [0, len(ONE)])

    def test_a_use_is_not_written_but_at_the_end(self):
        self.start()
        self.ask(ONE)
        self.ask(OTHER)
        path = os.path.join(self.directory, INDEX)
        shelf = self.front.shelf
        state = next(iter(shelf.states.values()))
        before = os.stat(path).st_mtime_ns, os.stat(path).st_ino
        shelf.used(state)
        self.assertEqual((os.stat(path).st_mtime_ns, os.stat(path).st_ino), before)
        shelf.close()
        with open(path, encoding="ascii") as file:
            names = [one["name"] for one in json.load(file)["states"]]
        self.assertEqual(names[-1], state.name)

    def test_files_are_held_against_their_hash_after_a_start(self):
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
        with mock.patch.object(shelf_module, "settle", side_effect=OSError(24, "too many open files")):
            self.assertEqual((self.ask(ONE), self.counts()["lost"]), (0, 0))
        self.fake.restart()
        with mock.patch.object(shelf_module, "settle", side_effect=settle) as hashed:
            self.assertEqual(self.ask(ONE), len(ONE))
            first = hashed.call_count
            self.ask(OTHER)
            self.ask(ONE)
        # One look at what was there, and one at each state that was saved.
        self.assertEqual((first, hashed.call_count), (2, 4))

    def test_a_wrong_directory_is_found_out(self):
        wrong = tempfile.TemporaryDirectory()
        self.addCleanup(wrong.cleanup)
        self.start(directory=wrong.name)
        for number in range(MOST_MISSING + 3):
            self.ask(f"{number} " * 200)
        self.assertEqual((len(self.files()), self.counts()["not_saved"]), (MOST_MISSING, MOST_MISSING))

    def test_an_index_that_is_too_large_costs_no_states(self):
        self.start()
        self.ask(ONE)
        with mock.patch.object(shelf_module, "MOST_INDEX_BYTES", 10):
            with self.assertRaises(IndexTooLarge):
                Shelf(self.directory, 1 << 20)
        self.assertEqual(len(self.files()), 1)

    def test_the_index_is_bounded(self):
        with mock.patch.object(shelf_module, "MOST_ALL_BLOCKS", 20):
            self.start()
            for number in range(6):
                self.ask(f"{number} " * 200)
                self.assertLessEqual(self.front.shelf.used_blocks, 20)
        self.assertEqual((self.counts()["evicted"], len(self.files())), (3, 3))
        most = 28 * shelf_module.MOST_ALL_BLOCKS + 200 * shelf_module.MOST_STATES
        self.assertLess(most, shelf_module.MOST_INDEX_BYTES)


if __name__ == "__main__":
    unittest.main()
