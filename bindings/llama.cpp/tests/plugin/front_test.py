#!/usr/bin/env python3
"""Tests of the front: prompts are restored into slots, for every kind of request."""

import http.client
import json
import os
import tempfile
import threading
import unittest

from front_fake import WAIT_S, FrontCase
from kvtier_front import keys
from kvtier_front.model import file_of, identity_of
from kvtier_front.state_cache import INDEX, StateCache, lock_directory, open_policy
from kvtier_front.slots import MAX_FUTILE, RETRY_REQUESTS


class Requests(FrontCase):
    def test_overwritten_prompt_is_restored(self):
        self.start()
        one, other = "one " * 100, "two " * 100
        self.assertEqual(self.ask(one), 0)
        self.assertEqual(self.ask(other), 0)
        self.assertEqual(self.ask(one), len(one))
        self.assertEqual(self.counts()["restored"], 1)

    def test_branches_are_restored(self):
        self.start()
        start = "a common start of some length. " * 10
        one, other = start + "one end " * 20, start + "another end " * 20
        self.ask(one)
        self.assertGreaterEqual(self.ask(other), len(start))
        self.assertEqual(self.ask(one), len(one))
        self.assertEqual(self.ask(one + " answer"), len(one + " answer"))

    def test_states_are_found_after_a_restart(self):
        self.start()
        prompt = "a long conversation " * 40
        self.ask(prompt)
        self.fake.slots[0] = ""
        self.start()
        self.assertEqual(self.counts()["found_again"], 1)
        self.assertEqual(self.ask(prompt), len(prompt))
        self.start(identity="another model")
        self.fake.restart()
        self.assertEqual((self.counts()["found_again"], self.ask(prompt)), (1, 0))
        self.assertEqual((self.counts()["restored"], len(self.files())), (0, 2))

    def test_damaged_index_is_ignored(self):
        self.start()
        self.ask("a prompt " * 60)
        path = os.path.join(self.directory, INDEX)
        with open(path, encoding="ascii") as file:
            good = json.load(file)
        entry = good["states"][0]
        for damage in ["", "{", "[]", "{\"states\": 7}", json.dumps({**good, "states": [7, {}]}),
                       json.dumps({**good, "states": [{**entry, "name": "../" + entry["name"]}]}),
                       json.dumps({**good, "states": [{**entry, "bytes": entry["bytes"] + 1}]}),
                       json.dumps({**good, "states": [{**entry, "hash": None}]}), "[" * 99999,
                       json.dumps({**good, "states": [{**entry, "blocks": ["x"]}]})]:
            with open(path, "w", encoding="ascii") as file:
                file.write(damage)
            cache = StateCache(self.directory, 1 << 20)
            self.assertEqual((cache.states, cache.used_bytes), ({}, 0), damage)

    def test_states_stay_within_the_budget(self):
        self.start(budget=5000)
        for number in range(12):
            self.ask(f"{number} " * 500)
            used = sum(os.path.getsize(os.path.join(self.directory, name)) for name in self.files())
            self.assertLessEqual(used, 5000)
            self.assertEqual(used, self.front.cache.used_bytes)
        self.assertGreater(self.counts()["evicted"], 0)
        last = "11 " * 500
        self.fake.slots[0] = ""
        self.front.slots.all[0].blocks = []
        self.assertEqual(self.ask(last), len(last))

    def test_failed_restore_or_save_does_not_fail_the_request(self):
        self.start()
        one = "one " * 100
        self.ask(one)
        for name in self.files():
            with open(os.path.join(self.directory, name), "w", encoding="ascii") as file:
                file.write("damaged")
        self.ask("other " * 100)
        self.assertEqual(self.ask(one), 0)
        self.assertEqual(self.counts()["restore_failed"], 1)
        self.fake.is_full = True
        self.ask("third " * 100)
        self.assertEqual(self.counts()["not_saved"], 1)
        self.assertEqual(self.ask("third " * 100), len("third " * 100))

    def test_windowed_model_restores_whole_states_only(self):
        self.start(is_windowed=True)
        start = "a common start of some length. " * 40
        one = start + "one end " * 20
        self.ask(one)
        self.ask("nothing like it " * 40)
        self.assertEqual(self.ask(start + "another end " * 20), 0)
        self.assertTrue(self.counts()["only_whole"])
        self.ask("something else " * 40)
        answered = one + f" answer to {len(one)}"
        self.assertEqual(self.ask(answered + " and more"), len(answered))

    def test_front_pauses_when_no_state_is_used_and_retries(self):
        self.start()
        self.fake.reuses_nothing = True
        prompts = [f"{number} is a prompt of some length. " * 40 for number in range(2)]
        for number in range(2 + MAX_FUTILE):
            self.assertFalse(self.counts()["in_vain"])
            self.assertEqual(self.ask(prompts[number % 2]), 0)
        self.assertTrue(self.counts()["in_vain"] and self.counts()["only_whole"])
        saved = self.counts()["saved"]
        for number in range(RETRY_REQUESTS - 1):
            self.ask(f"{number} short")
        self.assertEqual(self.counts()["saved"], saved)
        self.fake.reuses_nothing = False
        self.ask(prompts[0])
        self.assertEqual(self.ask(prompts[1]), len(prompts[1]))
        for number in range(RETRY_REQUESTS):
            self.ask(f"{number} short")
        self.assertFalse(self.counts()["in_vain"] or self.counts()["only_whole"])

    def test_streamed_chat_is_recorded(self):
        self.start()
        messages = [{"role": "user", "content": "tell me " * 50}]
        body = {"messages": messages, "stream": True}
        status, content = self.request("POST", "/v1/chat/completions", json.dumps(body))
        self.assertEqual((status, content.count(b"data: ")), (200, 4))
        self.wait_for_saves()
        text = "<user>" + "tell me " * 50
        expected = keys.chain(self.counts()["identity"], text + f" answer to {len(text)}")
        self.assertEqual(self.front.slots.all[0].blocks, expected)
        self.assertEqual(self.ask([1, 2, 3] * 50), 0)
        self.assertEqual(self.ask([1, 2, 3] * 60), 300)

    def test_requests_use_all_slots_and_excess_gets_503(self):
        self.start(slots=2, wait_s=0.2)
        held = json.dumps({"prompt": "first " * 50, "wait": True})
        answers = []
        thread = threading.Thread(target=lambda: answers.append(self.request("POST", "/completion", held)))
        thread.start()
        self.assertTrue(self.fake.started.wait(WAIT_S))
        status, content = self.request("POST", "/completion", json.dumps({"prompt": "second " * 50}))
        self.assertEqual((status, json.loads(content)["slot"]), (200, 1))
        self.fake.started.clear()
        with self.front.slots.free:  # the second slot is released after its save
            self.assertTrue(self.front.slots.free.wait_for(
                lambda: not self.front.slots.all[1].is_busy, WAIT_S))
        other = threading.Thread(target=lambda: answers.append(self.request("POST", "/completion", held)))
        other.start()
        self.assertTrue(self.fake.started.wait(WAIT_S))
        status, _ = self.request("POST", "/completion", json.dumps({"prompt": "third " * 50}))
        self.assertEqual(status, 503)
        self.fake.resume.set()
        thread.join(WAIT_S)
        other.join(WAIT_S)
        self.assertEqual([status for status, _ in answers], [200, 200])
        self.wait_for_saves()

    def test_invalid_requests_are_refused(self):
        self.start(most_body_bytes=1000)
        self.assertEqual(self.request("POST", "/completion", "x" * 1001)[0], 413)
        self.assertEqual(self.request("POST", "/completion", "{")[0], 400)
        self.assertEqual(self.request("POST", "/completion", "[1]")[0], 400)
        self.assertEqual(self.request("POST", "/completion", "[" * 999)[0], 400)
        self.assertEqual(self.request("POST", "/slots/0?action=erase", "{}")[0], 403)
        self.assertEqual(self.request("POST", "/completion", None, {"Transfer-Encoding": "chunked"})[0], 411)
        status, content = self.request("GET", "/props?x=1")
        self.assertEqual((status, json.loads(content)["path"]), (200, "/props?x=1"))
        self.assertEqual(json.loads(self.request("POST", "/tokenize", "{\"a\": 1}")[1]), {"echo": {"a": 1}})
        self.assertEqual(json.loads(self.request("GET", "/kvtier")[1])["requests"], 0)
        connection = http.client.HTTPConnection("127.0.0.1", self.front.server_address[1], timeout=WAIT_S)
        for _ in range(2):
            connection.request("OPTIONS", "/completion", headers={"Origin": "here"})
            answer = connection.getresponse()
            answer.read()
            self.assertEqual((answer.status, answer.getheader("Access-Control-Allow-Origin")), (204, "here"))
        connection.close()
        self.fake.server_close()
        self.fake.shutdown()
        self.assertEqual(self.request("POST", "/completion", "{\"prompt\": \"x\"}")[0], 502)
        self.assertFalse(self.front.slots.all[0].is_busy)


class Policies(unittest.TestCase):
    def test_kvtier_policy_evicts_states(self):
        try:
            policy = open_policy("s3fifo")
        except ImportError:
            self.skipTest("the Python package kvtier is not installed")
        with tempfile.TemporaryDirectory() as folder:
            cache = StateCache(folder, 5000, policy)
            for number in range(20):
                name = cache.new_name()
                with open(cache.path(name), "w", encoding="ascii") as file:
                    file.write("x" * 1500)
                cache.add(name, keys.chain("model", f"{number:03}" * 100))
                self.assertLessEqual(cache.used_bytes, 5000)
            self.assertEqual((len(cache.states), cache.counts["evicted"]), (3, 17))


class Directory(unittest.TestCase):
    def test_directory_admits_one_front(self):
        with tempfile.TemporaryDirectory() as folder:
            first = lock_directory(folder)
            with self.assertRaises(OSError):
                lock_directory(folder)
            os.close(first)
            os.close(lock_directory(folder))


class Identity(unittest.TestCase):
    def test_identity_depends_on_model_template_and_adapters(self):
        props, file = {"model_path": __file__, "build_info": "b1", "chat_template": "x"}, file_of(__file__)
        base = identity_of(props, [], file, "")
        for change in [{"build_info": "b2"}, {"chat_template": "y"}, {"model_path": "/x"}, {"total_slots": 2}]:
            self.assertNotEqual(identity_of({**props, **change}, [], file, ""), base)
        for others in [([], file, "lora 3"), ([{"id": 0, "scale": 1}], file, ""), ([], [1, 2], "")]:
            self.assertNotEqual(identity_of(props, *others), base)
        self.assertIsNone(file_of("/no/such/file"))
        self.assertIsNone(identity_of(props, [], None, ""))
        self.assertIsNotNone(identity_of(props, [], None, "said"))

    def test_chains_differ_from_the_first_different_block_on(self):
        one, other = keys.chain("m", "x" * 640), keys.chain("m", "x" * 300 + "y" + "x" * 339)
        self.assertEqual((len(one), keys.common(one, other)), (10, 4))
        self.assertEqual(keys.common(one, keys.chain("n", "x" * 640)), 0)
        self.assertEqual(keys.common(one, keys.chain("m", "x" * 640, "[1]")), 0)
        self.assertEqual(keys.chain(None, "x" * 640), [])


if __name__ == "__main__":
    unittest.main()
