#!/usr/bin/env python3
"""Writes the option structs of the C++ binding from the description of the C header.

    bindings/cpp/generate.py             rewrites the generated regions of bindings/cpp/*.hpp
    bindings/cpp/generate.py --check     fails, and prints a diff, if a region is not up to date
    bindings/cpp/generate.py --table     prints what is generated, what is written by hand, and why

A region stands in a header between two lines, and has one struct, or the members of one:

    // [kvt_submit_opts_t: by generate.py]
    // [kvt_layout_t members: by generate.py]
    // [end]

How a C struct becomes a C++ aggregate. Members keep the names, the types and the order of C:

| in C                                       | in C++                                                |
|--------------------------------------------|-------------------------------------------------------|
| struct_size, reserved, fields for output   | no member                                             |
| text and length                            | std::string_view; empty = null                        |
| bytes (`const void *`) and length          | std::optional<std::string_view>: absent is not empty  |
| array and count                            | span; the stride is the size of an entry              |
| array whose absence is not its emptiness   | std::optional<span> (OPTIONAL_ARRAYS)                 |
| array, or text, that is built in place     | std::vector, std::string (OWNED)                      |
| handle that is borrowed                    | ref<HANDLE>, from a pointer to the C++ object         |
| pointer to a struct that has a C++ form    | that form by value; to_c() takes a place for the C one |
| pointer to a struct that has none          | by value if it is complete, else the pointer          |
| enumeration                                | the same type; the default is the constant 0          |
| a flag                                     | bool, named as the constant                           |
| a flag that says that a field is set       | no member: that field is a std::optional (SETS)       |
| deadline_ns, other durations in ns         | deadline, std::chrono::nanoseconds                    |
| is_...                                     | bool                                                  |
| callback, user_data, destroy               | std::function, or nothing (CALLABLES)                 |

to_c() returns the C struct. It borrows the texts and arrays of the C++ one.
"""

import argparse
import difflib
import json
import re
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
DESCRIPTION = HERE.parents[1] / "include" / "kvtier" / "kvtier.json"
WIDTH = 100

# Structs that functions take and that are written by hand, or have no form in C++.
BY_HAND = {
    "kvt_block_names_t": "two forms of names share one count, which follows from the bytes",
    "kvt_sequence_t": "its two arrays are arguments of append, lookup and chunk_keys",
    "kvt_sparse_opts_t": "its fields are arguments of sparse::open",
    "kvt_resident_tokens_t": "its fields are arguments of place_column_sums",
    "kvt_model_table_t": "its two lists are arguments of model::table",
    "kvt_index_t": "the call fills its arrays: sparse_index has vectors that grow",
    "kvt_token_lists_t": "the call fills its arrays: token_lists is a vector of vectors",
    "kvt_policy_selection_t": "the call fills its arrays: selection has vectors that grow",
    "kvt_policy_custom_t": "a table of callbacks: score_fn",
    "kvt_policy_predictor_t": "a table of callbacks: predict_fn",
    "kvt_sparse_custom_t": "a table of callbacks: sparse_custom has std::function members",
    "kvt_device_custom_t": "a table of callbacks: custom_device has virtual functions",
    "kvt_remote_custom_t": "a table of callbacks: the C struct is used",
    "kvt_sparse_traits_t": "input and output: the C struct is used",
    "kvt_device_memory_t": "a token of an allocation: device_memory owns it",
    "kvt_kernel_t": "input and output, the layout of a kernel: the C struct is used",
}

# Names in C++ that are not those of C without kvt_ and _t.
NAMES = {"kvt_group_t": "layer_group"}

# Structs without pointers to build, which stand in arrays of the caller: C++ uses the C struct.
AS_IN_C = [
    "kvt_buffer_item_t", "kvt_copy_rows_t", "kvt_copy_t", "kvt_file_range_t", "kvt_index_head_t",
    "kvt_media_t", "kvt_policy_columns_t", "kvt_policy_object_t", "kvt_rows_t", "kvt_secret_t",
    "kvt_str_t", "kvt_view_t",
]

# Flags that say that fields are set: these fields are std::optional.
SETS = {
    "KVT_BUDGET_ZERO_HOST": ["host_bytes"],
    "KVT_BUDGET_ZERO_PINNED": ["pinned_bytes"],
    "KVT_BUDGET_ZERO_RESERVE": ["reserve_bytes"],
    "KVT_SESSION_PRIORITY": ["priority"],
    "KVT_PLAN_COST": ["alpha_ns", "beta_ns"],
    "KVT_POLICY_ZERO_REMEMBER": ["remember"],
    "KVT_POLICY_COST": ["alpha", "beta"],
    "KVT_CONTEXT_SESSION": ["session"],
    "KVT_CONTEXT_PRIORITY": ["priority"],
    "KVT_HINT_ZERO_CONFIDENCE": ["confidence"],
    "KVT_ADVICE_ZERO_SHRINK": ["shrink_above"],
    "KVT_ADVICE_ZERO_GROW": ["grow_below"],
    "KVT_TERMS_DEVICE_CEILING": ["device_ceiling_bytes"],
    "KVT_TERMS_HOST_CEILING": ["host_ceiling_bytes"],
    "KVT_TERMS_DEVICE_SAFETY": ["device_safety_bytes"],
    "KVT_TERMS_HOST_RESERVE": ["host_reserve_bytes"],
    "KVT_TERMS_KV": ["kv_bytes"],
    "KVT_TERMS_EXPERT_SLOTS": ["expert_slots"],
    "KVT_STREAM_SIDECAR": ["sidecar"],
    "KVT_STREAM_SET_PINNED_PERCENT": ["pinned_percent"],
    "KVT_LIMIT_HOST": ["host_bytes"],
    "KVT_LIMIT_DEVICE": ["device_bytes"],
}

# Arrays of which null means something else than no entry.
OPTIONAL_ARRAYS = ["kvt_transfer_t.chunks", "kvt_stream_opts_t.order"]

# Lists and texts that programs write as literals or build in a loop: a view of them would dangle.
OWNED = [
    "kvt_group_t.layers", "kvt_device_opts_t.peers", "kvt_device_opts_t.streams",
    "kvt_stream_opts_t.order", "kvt_unit_entry_t.name", "kvt_unit_entry_t.ranges",
]

# Fields and flags without a member: what sets them.
ARGUMENTS = {
    "KVT_SUBMIT_EACH": "submit_each and post",
    "KVT_TRANSFER_EACH_LAYER": "put_each and get_each",
    "kvt_store_opts_t.flags": "none are defined",
    "kvt_stream_opts_t.model": "streamer::open",
    "kvt_offload_opts_t.session": "offload::open",
    "kvt_offload_opts_t.prefill_custom": "offload::open",
    "kvt_offload_opts_t.decode_custom": "offload::open",
    "kvt_device_opts_t.custom": "device::custom",
    "kvt_device_opts_t.kind": "device::host, cuda, simulated and custom",
    "kvt_trace_opts_t.path": "trace::open",
    "kvt_replay_opts_t.spec": "trace::replay",
    "kvt_replay_opts_t.capacity_blocks": "trace::replay",
}

# Callbacks as callables: (type, name, comment). The class that opens the object passes them.
CALLABLES = {
    "kvt_runtime_opts_t.on_thread": ("thread_fn", "on_thread", None),
    "kvt_queue_opts_t.callback": (
        "completion_fn", "callback",
        "Receives the completions, on the notifier thread; empty = the queue is polled. An "
        "exception goes to the defect hook, and the rest of that batch is lost."),
    "kvt_account_opts_t.reclaim": ("reclaim_fn", "reclaim", None),
    "kvt_policy_opts_t.custom": (
        "score_fn", "score", "Scores candidates; the spec \"custom\" requires it."),
    "kvt_policy_opts_t.predictor": ("predict_fn", "predict", "Predicts uses; may be empty."),
    "kvt_replay_opts_t.progress": (
        "progress_fn", "progress",
        "A copy is called on the calling thread. An exception cancels the replay."),
}

# Defaults that are not 0.
DEFAULTS = {
    "kvt_offload_opts_t.dtype": "KVT_DTYPE_F16",
    "kvt_offload_opts_t.buffers": "2",
    "kvt_unit_entry_t.role": "KVT_ROLE_OTHER",
    "kvt_unit_entry_t.layer": "KVT_NONE",
    "kvt_unit_entry_t.expert": "KVT_NONE",
}

# Comments that are wrong for the C++ form, by field, struct or flag.
COMMENTS = {
    "kvt_layout_t.layers":
        "The layers of a model whose layers are alike, at most 4096: set by gqa, mla and window, "
        "with the members below. 0 = `groups` describes the layers; else `groups` is empty.",
    "kvt_policy_context_t.session": "The caller's id of a sequence; absent = none.",
    "kvt_policy_context_t.tenant": "Tenant of the session; must be 0 without a session.",
    "kvt_policy_context_t.priority":
        "Class of the session, 0 to 255; 0 is evicted first. Absent = the class stays as it is, "
        "at first 1. Needs a session.",
    "kvt_policy_hint_t.confidence": "Confidence of next_use_ns, 0 to 1; absent = 1.",
    "kvt_policy_opts_t.alpha": "0 to 1e12.",
    "kvt_policy_opts_t.beta": "0 to 1e12.",
    "KVT_POLICY_COST":
        "Recomputing n tokens after l tokens of context costs n * beta + alpha * (n * l + n * n / "
        "2). Absent = 1 / 53800 and 1, which describe a model of the 70B class.",
    "KVT_PLAN_COST":
        "Cost of prefill; absent = the cost that the namespace observed, or that was set.",
    "kvt_session_opts_t.priority":
        "Priority class, 0 to 255; 0 is evicted first. Absent = the default.",
    "kvt_store_opts_t.write":
        "When chunks are written to disk, KVT_WRITE_* (`write`); 0 = as in the spec.",
    "kvt_identity_t":
        "Everything that KV depends on beside its tokens: sessions share KV if all fields are "
        "equal. Fields are bytes, at most 65536 each, hashed unchanged. An absent field differs "
        "from an empty one.",
    "kvt_stream_terms_t": "Memory limits and link rates of a plan.",
    "kvt_stream_terms_t.expert_slots":
        "Absent = as many as fit; with `shrinks` as few as a layer needs.",
    "kvt_stream_opts_t.terms": "Memory limits and link rates.",
    "kvt_stream_opts_t.sidecar":
        "Path of the checksum file; empty = beside the model (.kvtsum). Absent = no file. Ignored "
        "with KVT_VERIFY_NEVER.",
    "kvt_stream_limits_t": "Memory for weights from now on; an absent limit is unchanged.",
    "kvt_transfer_t.layers":
        "0 = as many as `k` has; without views, all from first_layer on.",
    "kvt_blocks_t.layers": "0 = as many as `k` has; without views, all from first_layer on.",
    "kvt_transfer_t.k": "One view per layer of K, the latent or the states; empty for a prefetch.",
    "kvt_transfer_t.v":
        "One view per layer of V, all zero for a layer without V; empty if no layer has V.",
    "kvt_transfer_t.chunks":
        "Gets and prefetches: only these chunks, for example those that a sparse policy selects. "
        "Ascending; 0 = the chunk of first_token. Views have the tokens of these chunks without "
        "gaps. At most 2^22; absent = all, and an empty list is an error.",
    "kvt_blocks_t.k":
        "One view per layer of K, the latent or the states: the tokens of all blocks, in the order "
        "of their names. Pages of chunk_tokens tokens give each block an address of its own. Empty "
        "for a prefetch.",
    "kvt_blocks_t.v": "As in transfer; so are the next members.",
    "kvt_attention_args_t.select":
        "Positions of the keys to use, from sparse_index::to_c; null = all.",
    "kvt_prefill_cost_t":
        "Cost of prefill. Computing n tokens after l tokens of context takes, in nanoseconds, "
        "n * beta_ns + alpha_ns * (n * l + n * n / 2).",
}

# Types of several fields that one flag sets, and the names of the members.
GROUPS = {
    "KVT_PLAN_COST": ("prefill_cost", "costs"),
    "KVT_POLICY_COST": (None, "costs"),
}

NUMBERS = {
    "uint8_t": "std::uint8_t", "uint16_t": "std::uint16_t", "uint32_t": "std::uint32_t",
    "uint64_t": "std::uint64_t", "int32_t": "std::int32_t", "int64_t": "std::int64_t",
    "float": "float", "double": "double",
}


class Description:
    """The C header: structs, handles, aliases with their constants."""

    def __init__(self, path):
        self.structs, self.handles, self.aliases = {}, set(), {}
        self.header_of, self.constants, self.taken, self.includes = {}, {}, set(), {}
        for header in json.loads(path.read_text())["headers"]:
            self.includes[header["name"]] = header["includes"]
            for item in header["items"]:
                name = item["name"]
                self.header_of[name] = header["name"]
                if item["kind"] == "struct":
                    self.structs[name] = item
                elif item["kind"] == "handle":
                    self.handles.add(name)
                elif item["kind"] == "alias":
                    self.aliases[name] = item["type"]
                elif item["kind"] == "constant" and item["type"]:
                    self.constants.setdefault(item["type"], []).append(item)
                elif item["kind"] == "function":
                    self.taken |= {p["type"] for p in item["params"]
                                   if p.get("const") and p.get("pointers") == 1}

    def flags_of(self, field):
        is_flags = field["name"] == "flags" and field["type"].endswith("_flags_t")
        return self.constants.get(field["type"], []) if is_flags else []

    def sees(self, struct, other):
        """Whether the header of `struct` includes the one that declares `other`."""
        seen, todo = set(), [self.header_of[struct]]
        while todo:
            seen.add(here := todo.pop())
            todo += self.includes[here]
        return self.header_of[other] in seen


def cpp_name(c_name):
    return NAMES.get(c_name) or c_name.removeprefix("kvt_").removesuffix("_t")


def comment(text, indent):
    if not text:
        return []
    lines = textwrap.wrap(text, WIDTH - len(indent) - 4, break_long_words=False,
                          break_on_hyphens=False)
    return [f"{indent}/// {line}" for line in lines]


class Struct:
    """The C++ form of one C struct."""

    def __init__(self, description, c_name, generated):
        self.d, self.c_name, self.generated = description, c_name, generated
        self.item = description.structs[c_name]
        self.members, self.body, self.places = [], [], []
        self.allocates = False
        fields = [f for f in self.item["fields"]
                  if f["name"] not in ("struct_size", "reserved", "user_data", "destroy")]
        self.fields = {f["name"]: f for f in fields}
        self.optional, self.groups = {}, {}
        for field in fields:
            for flag in description.flags_of(field):
                names = SETS.get(flag["name"], [])
                for name in names:
                    self.optional[name] = flag["name"]
                if len(names) > 1:
                    self.groups[flag["name"]] = names
        self.skip = set()
        for field in fields:
            if field["name"] not in self.skip:
                self.field(field)

    # Comments.

    def words(self, field, kind=""):
        key = f"{self.c_name}.{field['name']}"
        text = COMMENTS.get(key, field.get("doc", "")).replace("\n", " ")
        if key in COMMENTS:
            return text
        if kind == "view":
            text = re.sub(r"\bnull\b", "empty", text)
            text = re.sub(r"\bNull\b", "Empty", text)
        if kind == "optional":
            text = re.sub(r"(^|[ (])0 = ", r"\1absent = ", text)
            text = re.sub(r"\bnull = ", "absent = ", text)
        return self.translated(text)

    def translated(self, text):
        def member(match):
            c_name = f"kvt_{match[1]}_t"
            if c_name not in self.generated:
                return match[0]
            return f"{cpp_name(c_name)}::{match[2]}" if match[2] else cpp_name(c_name)

        text = re.sub(r"\bkvt_(\w+?)_t(?:\.(\w+))?\b", member, text)
        bools = {flag["name"]: name for field in self.fields.values()
                 for flag, name in self.bools(field)}
        for constant, name in bools.items():
            text = re.sub(rf"\b{constant}\b", f"`{name}`", text)
        return text

    @staticmethod
    def with_constants(text, names):
        """Adds the constants of an enumeration to a comment that names none of them."""
        prefix = names[0].rsplit("_", 1)[0] + "_" if names else ""
        while not all(name.startswith(prefix) for name in names):
            prefix = prefix[:-1].rsplit("_", 1)[0] + "_"
        if not names or prefix in text:
            return text
        listed = ", ".join(names) if len(names) < 4 else prefix + "*"
        return f"{text} {listed}.".strip()

    # Members.

    def member(self, cpp_type, name, default, text):
        self.members += comment(text, "    ")
        self.members.append(f"    {cpp_type}{'' if cpp_type.endswith('*') else ' '}{name}{default};")

    def bools(self, field):
        prefix = "KVT_" + field["type"].removeprefix("kvt_").removesuffix("_flags_t").upper() + "_"
        for flag in self.d.flags_of(field):
            if flag["name"] in SETS or flag["name"] in ARGUMENTS:
                continue
            name = flag["name"]
            name = name.removeprefix(prefix) if name.startswith(prefix) else name.split("_", 2)[2]
            yield flag, name.lower()

    def count_of(self, name):
        for count in (f"{name}_count", f"{name.removesuffix('s')}_count"):
            if count in self.fields:
                return count
        return None

    def stride_of(self, name):
        for stride in (f"{name}_stride_bytes", f"{name.removesuffix('s')}_stride_bytes",
                       "stride_bytes"):
            if stride in self.fields:
                return stride
        return None

    def field(self, field):
        name = field["name"]
        key = f"{self.c_name}.{name}"
        self.skip.add(name)
        if field.get("doc", "").startswith("Out:"):
            return
        if key in ARGUMENTS:
            self.skip |= {f"{name}_bytes"}
            return
        if key in CALLABLES:
            cpp_type, cpp, text = CALLABLES[key]
            self.member(cpp_type, cpp, "{}", text or self.words(field, "view"))
        elif name == "flags":
            self.flags(field)
        elif field.get("pointers"):
            self.pointer(field)
        else:
            self.value(field)

    def flags(self, field):
        if not field["type"].endswith("_flags_t"):
            return  # no flags are defined
        for flag, name in self.bools(field):
            self.member("bool", name, " = false", self.translated(flag["doc"].replace("\n", " ")))
            self.body.append(f"if ({name}) c.flags |= {flag['name']};")

    def value(self, field):
        name, c_type = field["name"], field["type"]
        default = DEFAULTS.get(f"{self.c_name}.{name}")
        cpp_type, value = NUMBERS.get(c_type, c_type), name
        if c_type in self.d.aliases and default is None:
            zero = [c for c in self.d.constants.get(c_type, []) if c["value"] == "0"]
            default = zero[0]["name"] if zero else None
        if name in self.optional:
            self.set_by_flag(field, cpp_type)
            return
        if name == "deadline_ns":
            self.member("kvt::deadline", "deadline", "{}", self.words(field))
            self.body.append("c.deadline_ns = deadline.ns;")
            return
        if name.endswith("_ns") and c_type == "uint64_t":
            short = name.removesuffix("_ns")
            self.member("std::chrono::nanoseconds", short, "{0}", self.words(field))
            self.body.append(f"c.{name} = detail::count({short});")
            return
        if name.startswith("is_") and c_type == "uint32_t":
            text = re.sub(r"^1 = ", "True = ", self.words(field)).replace(", 0 = ", ", false = ")
            self.member("bool", name, " = false", text)
            self.body.append(f"c.{name} = {name} ? 1 : 0;")
            return
        text = self.words(field)
        if c_type in self.d.aliases:
            text = self.with_constants(text, [c["name"] for c in self.d.constants.get(c_type, [])])
        self.member(cpp_type, name, f" = {default or 0}", text)
        if name == "layers" and "k" in self.fields:
            value = "layers != 0 ? layers : static_cast<std::uint32_t>(k.size())"
        self.body.append(f"c.{name} = {value};")

    def set_by_flag(self, field, cpp_type):
        name, flag = field["name"], self.optional[field["name"]]
        if flag not in self.groups:
            self.member(f"std::optional<{cpp_type}>", name, "{}", self.words(field, "optional"))
            self.body.append(f"if ({name}) c.flags |= {flag};")
            self.body.append(f"c.{name} = {name}.value_or(0);")
            return
        names = self.groups[flag]
        self.skip |= set(names)
        group, member = GROUPS[flag]
        self.members += comment(COMMENTS[flag], "    ") if group is None else []
        if group is None:
            group = member.removesuffix("s")
            self.members.append(f"    struct {group} {{")
            for one in names:
                text = self.words(self.fields[one])
                self.members += comment(text, "        ")
                self.members.append(f"        double {one} = 0;")
            self.members.append("    };")
            self.member(f"std::optional<{group}>", member, "{}", "")
        else:
            self.member(f"std::optional<{group}>", member, "{}", COMMENTS[flag])
        self.body.append(f"if ({member}) {{")
        self.body.append(f"    c.flags |= {flag};")
        self.body += [f"    c.{one} = {member}->{one};" for one in names]
        self.body.append("}")

    def pointer(self, field):
        name, c_type = field["name"], field["type"]
        key = f"{self.c_name}.{name}"
        count, length = self.count_of(name), f"{name}_bytes"
        if c_type == "char" and length in self.fields:
            self.skip.add(length)
            if name in self.optional:
                self.member("std::optional<std::string_view>", name, "{}", self.words(field, "view"))
                self.body.append(f"if ({name}) {{")
                self.body.append(f"    c.flags |= {self.optional[name]};")
                self.body.append(f"    detail::text(*{name}, c.{name}, c.{length});")
                self.body.append("}")
                return
            cpp_type = "std::string" if key in OWNED else "std::string_view"
            self.member(cpp_type, name, "{}", self.words(field, "view"))
            self.body.append(f"detail::text({name}, c.{name}, c.{length});")
        elif c_type == "void" and length in self.fields:
            self.skip.add(length)
            self.member("std::optional<std::string_view>", name, "{}", self.words(field))
            self.body.append(f"detail::bytes({name}, c.{name}, c.{length});")
        elif c_type in self.d.handles:
            self.member(f"ref<{c_type}>", name, "{}", self.words(field))
            self.body.append(f"c.{name} = {name}.get();")
        elif count:
            self.array(field, count)
        elif c_type == "kvt_view_t":
            self.member("span<const kvt_view_t>", name, "{}", self.words(field))
            self.body.append(f"c.{name} = {name}.empty() ? nullptr : {name}.data();")
            if "stride_bytes" not in self.skip:
                self.body.append("c.stride_bytes = sizeof(kvt_view_t);")
            self.skip.add("stride_bytes")
        elif c_type in self.generated or c_type in BY_HAND and c_type == "kvt_block_names_t":
            cpp = f"kvt::{cpp_name(c_type)}"
            self.member(cpp, name, "{}", self.words(field))
            place = f"{name}_c"
            self.places.append(f"{c_type} &{place}")
            self.body += [f"{place} = {name}.to_c();", f"c.{name} = &{place};"]
        elif self.d.sees(self.c_name, c_type) and c_type in AS_IN_C:
            init = c_type.removesuffix("_t").upper() + "_INIT"
            self.member(c_type, name, f" = {init}", self.words(field))
            self.body.append(f"c.{name} = &{name};")
        elif c_type in self.d.structs:
            self.member(f"const {c_type} *", name, " = nullptr", self.words(field))
            self.body.append(f"c.{name} = {name};")
        else:
            sys.exit(f"{key}: no rule for a field of this type")

    def array(self, field, count):
        name, c_type = field["name"], field["type"]
        key = f"{self.c_name}.{name}"
        stride = self.stride_of(name) if c_type in self.d.structs else None
        limit = self.fields[count].get("doc", "").replace("\n", " ")
        self.skip.add(count)
        text = self.words(field, "optional" if key in OPTIONAL_ARRAYS else "view")
        if limit and key not in COMMENTS:
            text = f"{text} {limit}"
        if c_type in self.generated:
            cpp, place = cpp_name(c_type), f"{name}_c"
            self.allocates = True
            self.member(f"std::vector<{cpp}>", name, "{}", text)
            self.places.append(f"std::vector<{c_type}> &{place}")
            self.body.append(f"{place}.clear();")
            self.body.append(f"for (const {cpp} &one : {name}) {place}.push_back(one.to_c());")
            value = place
        else:
            entry = NUMBERS.get(c_type, c_type)
            cpp_type = f"span<const {entry}>" if key not in OWNED else f"std::vector<{entry}>"
            if key in OPTIONAL_ARRAYS:
                cpp_type = f"std::optional<{cpp_type}>"
            self.member(cpp_type, name, "{}", text)
            value = name
        self.body.append(f"detail::list({value}, c.{name}, c.{count});")
        if stride:
            self.skip.add(stride)
            self.body.append(f"c.{stride} = sizeof({c_type});")

    # The text of the region.

    def text(self, only_members):
        init = (self.c_name.removesuffix("_t").upper() + "_INIT" if self.item["sized"]
                else f"{self.c_name}()")
        takes = ", ".join(self.places)
        throws = "" if self.allocates else " noexcept"
        lines = self.members + ["", f"    {self.c_name} to_c({takes}) const{throws} {{",
                                f"        {self.c_name} c = {init};"]
        lines += [f"        {line}" for line in self.body] + ["        return c;", "    }"]
        if only_members:
            return lines
        doc = COMMENTS.get(self.c_name, self.item.get("doc", "")).replace("\n", " ")
        doc = re.sub(r" Stands in arrays( only)?\.", "", doc)
        head = comment(self.translated(doc), "")
        return head + [f"struct {cpp_name(self.c_name)} {{"] + lines + ["};"]


REGION = re.compile(r"^( *)// \[(kvt_\w+_t)( members)?: by generate\.py\]\n(.*?)^ *// \[end\]\n",
                    re.MULTILINE | re.DOTALL)


def headers():
    return sorted(HERE.glob("*.hpp"))


def regenerate(description):
    """New texts of the headers, and the structs that they have."""
    generated = {m[2]: path.stem for path in headers() for m in REGION.finditer(path.read_text())}
    texts = {}

    def region(match):
        struct = Struct(description, match[2], generated)
        body = "".join(line.rstrip() + "\n" for line in struct.text(bool(match[3])))
        head = match[0][:match[0].index("\n") + 1]
        return f"{head}{body}{match[1]}// [end]\n"

    for path in headers():
        texts[path] = REGION.sub(region, path.read_text())
    return texts, generated


def problems(description, generated):
    """What the tables of this script and the description do not agree on."""
    for name in description.taken:
        if name in description.structs and not (
                name in generated or name in BY_HAND or name in AS_IN_C):
            yield f"{name} is taken by a function: generate it, or say in BY_HAND why not"
    for name, header in generated.items():
        if description.header_of[name] != header:
            yield f"{name} stands in {header}.hpp, and in C in {description.header_of[name]}.h"
    known = {c["name"] for all_of in description.constants.values() for c in all_of}
    fields = {f"{s}.{f['name']}" for s, item in description.structs.items() for f in item["fields"]}
    names = [*BY_HAND, *AS_IN_C, *NAMES, *SETS, *OPTIONAL_ARRAYS, *OWNED, *ARGUMENTS, *CALLABLES,
             *DEFAULTS, *COMMENTS, *GROUPS]
    for name in names:
        if name not in known and name not in fields and name not in description.structs:
            yield f"{name} stands in a table of this script, and not in the header"


def table(texts, generated):
    for name, header in sorted(generated.items(), key=lambda pair: (pair[1], pair[0])):
        print(f"{header + '.hpp':14} {cpp_name(name):22} {name}")
    print()
    for name, why in BY_HAND.items():
        print(f"{name:26} by hand: {why}")
    for name in AS_IN_C:
        print(f"{name:26} as in C: a plain value, which stands in arrays")
    lines = sum(m[4].count("\n") for text in texts.values() for m in REGION.finditer(text))
    print(f"\n{len(generated)} structs, {lines} generated lines")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--table", action="store_true", help="print what is generated, and why not")
    args = parser.parse_args()
    description = Description(DESCRIPTION)
    texts, generated = regenerate(description)
    wrong = sorted(problems(description, generated))
    if args.table:
        table(texts, generated)
        return
    stale = 0
    for path, text in texts.items():
        old = path.read_text()
        if text == old:
            continue
        stale += 1
        if args.check:
            sys.stdout.writelines(difflib.unified_diff(
                old.splitlines(True), text.splitlines(True), str(path.name), "generated"))
        else:
            path.write_text(text)
    if args.check and stale:
        wrong.append("regions are stale: run bindings/cpp/generate.py")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
