#!/usr/bin/env python3
"""Checks the manual: links, anchors, pictures, the table of contents, blocks of code, and names of the code in prose.

    docs/check.py [--root DIR] [--kvtier TOOL] [--bench TOOL] [--book OUT] [--work DIR] [--self-test]

--root       the repository; default: the one of this file
--kvtier     the tool that checks specs, configurations and command lines; default target/debug/kvtier
--bench      `kvtier-bench`; default beside the tool
--book       a built book: also checks the links, anchors and pictures of its pages
--work       folder for files that are compiled; default a temporary one
--self-test  plants faults in a manual of its own, and fails unless each is found

Prints one line for each fault: FILE:LINE: what is wrong. Needs gcc, g++, clang and clang++.
"""

import argparse
import ast
import concurrent.futures
import html.parser
import json
import os
import posixpath
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
import urllib.parse
import xml.etree.ElementTree

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "tools"))
import markdown  # noqa: E402

LANGUAGES = {"c", "cpp", "rust", "python", "sh", "toml", "json", "yaml", "cmake", "text", "spec", "promql"}
FLAGS = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-D_DEFAULT_SOURCE"]
# A fragment may declare what only its next one uses.
FRAGMENT_FLAGS = ["-Wno-unused-variable", "-Wno-unused-but-set-variable"]
COMPILERS = {"c": (["gcc", "-std=c11"], ["clang", "-std=c11"]),
             "cpp": (["g++", "-std=c++20"], ["clang++", "-std=c++20"])}
# Folders that are no part of the sources.
SKIPPED = {"target", "build", "node_modules", "vendor", "carry", "dist", ".git", ".venv", "__pycache__"}
INCLUDE = re.compile(r"^\{\{\s*#(?:rustdoc_)?include\s+([^}:\s]+)(?::([^}\s]*))?\s*\}\}$")
# Specs inside of texts of programs.
SPEC_TEXT = re.compile(r'"(store\((?:[^"\\\n]|\\.)*)"')


class Check:
    """A run over one repository."""

    def __init__(self, options):
        self.root = os.path.abspath(options.root)
        self.docs = os.path.join(self.root, "docs")
        self.options = options
        self.work = options.work
        self.linking = threading.Lock()
        self.faults = []
        self.pages = {}
        self.counts = {}

    def fault(self, page, line, text):
        """Reports a fault of a page."""
        self.faults.append((page, line, text))

    def run(self):
        """Checks everything and prints the faults; returns their number."""
        self.check()
        for page, line, text in sorted(set(self.faults)):
            print(f"{page}:{line}: {text}")
        return len(set(self.faults))

    def check(self):
        """Checks everything."""
        self.read()
        self.contents()
        self.links()
        self.pictures()
        self.names()
        blocks = [(page, block) for page, one in sorted(self.pages.items()) for block in one.blocks]
        for page, block in blocks:
            block.path = None
            if block.language not in LANGUAGES:
                known = ", ".join(sorted(LANGUAGES))
                self.fault(page, block.line - 1, f"a block of '{block.language}': use one of {known}")
            self.include(page, block)
            self.counts[block.language] = self.counts.get(block.language, 0) + 1
        of = {language: [pair for pair in blocks if pair[1].language == language] for language in LANGUAGES}
        with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
            jobs = [pool.submit(self.compiled, language, of[language]) for language in ("c", "cpp")]
            jobs += [pool.submit(self.shell, of["sh"]), pool.submit(self.specs, blocks),
                     pool.submit(self.configurations, of["toml"])]
            for language in ("python", "json", "yaml", "promql", "cmake"):
                for page, block in of[language]:
                    getattr(self, language)(page, block)
            self.command_spans()
            for job in jobs:
                job.result()
        if self.options.book:
            self.book()

    # ---- pages

    def read(self):
        """Reads all pages."""
        for folder, folders, names in os.walk(self.docs):
            folders[:] = [name for name in folders if name not in ("tools", "theme", "checks")]
            for name in names:
                if name.endswith(".md"):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8") as page:
                        text = page.read()
                    self.pages[os.path.relpath(path, self.root)] = one = markdown.Page(text)
                    one.text = text
        for page, one in self.pages.items():
            if one.unclosed:
                self.fault(page, one.unclosed, "this block of code is not closed")
            if not page.endswith("SUMMARY.md") and [level for _, level, _ in one.headings][:1] != [1]:
                self.fault(page, 1, "a page begins with its title: # TITLE")

    def contents(self):
        """Every page is listed once, every listed page exists."""
        summary = "docs/SUMMARY.md"
        if summary not in self.pages:
            return self.fault(summary, 1, "it is missing")
        listed = {}
        for line, target in self.pages[summary].links:
            page = posixpath.normpath(posixpath.join("docs", target))
            if page in listed:
                self.fault(summary, line, f"{target} is listed twice")
            listed[page] = line
            if page not in self.pages:
                self.fault(summary, line, f"{target} does not exist")
        for page in self.pages:
            if page not in listed and page != summary:
                self.fault(page, 1, "docs/SUMMARY.md does not list this page")

    def links(self):
        """Links inside of the repository and their anchors, also of its Markdown files outside of docs."""
        pages = dict(self.pages)
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if name not in SKIPPED]
            for path in (os.path.join(folder, name) for name in names if name.endswith(".md")):
                page = os.path.relpath(path, self.root)
                if not page.startswith("docs/"):
                    with open(path, encoding="utf-8") as text:
                        pages[page] = markdown.Page(text.read())
        anchors = {page: one.anchors() for page, one in pages.items()}
        for page, one in pages.items():
            for line, target in one.links:
                self.link(page, line, target, anchors)

    def link(self, page, line, target, anchors):
        """A link of a page."""
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            return
        path, _, fragment = target.partition("#")
        if path.startswith("/"):
            return self.fault(page, line, f"{target}: links inside of the manual are relative")
        path = urllib.parse.unquote(path)
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        if place.startswith("docs/reference/c-api/"):
            # Doxygen makes it; --book checks it.
            return
        if place.startswith("docs/") and place.endswith(".html"):
            return self.fault(page, line, f"{target}: link to the page, {target.replace('.html', '.md')}")
        if place.startswith("..") or not os.path.exists(os.path.join(self.root, place)):
            return self.fault(page, line, f"dead link: {target}")
        if fragment and place in anchors and fragment not in anchors[place]:
            near = [name for name in sorted(anchors[place]) if fragment in name or name in fragment]
            hint = f"; it has #{near[0]}" if near else ""
            self.fault(page, line, f"dead anchor: {target}{hint}")

    def pictures(self):
        """Pictures exist, have a description, and are used."""
        used = set()
        for page, one in self.pages.items():
            for line, target, label in one.images:
                if "://" in target:
                    self.fault(page, line, f"{target}: pictures are part of the manual")
                    continue
                place = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
                used.add(place)
                if not os.path.exists(os.path.join(self.root, place)):
                    self.fault(page, line, f"missing picture: {target}")
                if not label.strip():
                    self.fault(page, line, f"{target}: a picture needs a description in its brackets")
        for folder, _, names in os.walk(self.docs):
            for name in names:
                place = os.path.relpath(os.path.join(folder, name), self.root)
                if not name.endswith(".svg") or place.startswith("docs/theme/"):
                    continue
                try:
                    xml.etree.ElementTree.parse(os.path.join(folder, name))
                except xml.etree.ElementTree.ParseError as error:
                    self.fault(place, 1, f"not XML: {error}")
                if place not in used:
                    self.fault(place, 1, "no page shows this picture")

    def names(self):
        """Names of the C interface in prose and in blocks are those of the code."""
        known, name = set(), re.compile(r"\b(?:kvt|KVT)_\w+")
        for folder in ("include", "bindings", "ffi-tests/c", "examples", "src"):
            for path in files(os.path.join(self.root, folder), (".h", ".hpp", ".c", ".cpp", ".py", ".go", ".js", ".rs")):
                with open(path, encoding="utf-8", errors="replace") as source:
                    known.update(name.findall(source.read()))
        starts = {one[:end] for one in known for end in range(4, len(one))}
        use = re.compile(r"\b((?:kvt|KVT)_\w+)(\*|\{|<|…|\.\.\.)?")
        for page, one in self.pages.items():
            for number, line in enumerate(one.text.split("\n"), 1):
                for found, more in use.findall(line):
                    is_part = more or found.endswith("_")
                    if found not in known and not (is_part and found in starts):
                        self.fault(page, number, f"'{found}' is no name of the C interface")

    # ---- blocks

    def include(self, page, block):
        """Puts the file that a block includes in its place."""
        lines = block.text.split("\n")
        found = [(at, INCLUDE.match(line.strip())) for at, line in enumerate(lines)]
        for at, match in reversed([(at, match) for at, match in found if match]):
            place = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1]))
            path = os.path.join(self.root, place)
            if not os.path.isfile(path):
                self.fault(page, block.line + at, f"missing file to include: {match[1]}")
                continue
            with open(path, encoding="utf-8") as source:
                text = source.read().rstrip("\n").split("\n")
            text = self.part(page, block.line + at, text, match[2])
            lines[at:at + 1] = [line for line in text if "ANCHOR" not in line]
            block.path = place if len(lines) - len(text) <= 2 else block.path
        block.text = "\n".join(lines)

    def part(self, page, line, text, part):
        """The part of a file that `{{#include FILE:PART}}` names."""
        if not part:
            return text
        numbers = re.fullmatch(r"(\d*)(?::(\d*))?", part)
        if numbers:
            first = int(numbers[1] or 1)
            last = first if numbers[2] is None else int(numbers[2] or len(text))
            return text[first - 1:last]
        begin = [at for at, one in enumerate(text) if re.search(rf"ANCHOR:\s*{re.escape(part)}\b", one)]
        end = [at for at, one in enumerate(text) if re.search(rf"ANCHOR_END:\s*{re.escape(part)}\b", one)]
        if not begin or not end:
            self.fault(page, line, f"the file to include has no anchor '{part}'")
            return []
        return text[begin[0] + 1:end[0]]

    def compiled(self, language, blocks):
        """C or C++: files by themselves, all fragments together, each as the body of a function."""
        whole, parts, seen = [], [], set()
        for number, (page, block) in enumerate(blocks):
            is_file = re.search(r"^\s*#\s*include\b", block.text, re.M)
            at = f'#line {block.line} "{page}"\n'
            if block.path and is_file:
                if block.path in seen:
                    continue
                seen.add(block.path)
                at = f'#line 1 "{block.path}"\n'
            if is_file:
                folder = os.path.join(self.root, os.path.dirname(block.path or page))
                whole.append((f"{language}-{number}.{language}", at + block.text, folder))
            else:
                body = f"int fragment_{number}(void);\nint fragment_{number}(void)\n{{\n{at}{block.text}\n"
                last = block.line + block.text.count("\n") - 1
                parts.append(f'{body}#line {last} "{page}"\nreturn 0;\n}}\n')
        prelude = f'#include "{os.path.join(self.docs, "checks/prelude.h")}"\n'
        if language == "cpp":
            prelude += "#include <kvtier/kvtier.hpp>\n"
        names = self.written([(name, text) for name, text, _ in whole])
        folders = sorted({folder for _, _, folder in whole})
        together = self.written([(f"fragments.{language}", prelude + "".join(parts))]) if parts else []
        for compiler in COMPILERS[language]:
            if shutil.which(compiler[0]) is None:
                self.fault("docs/check.py", 1, f"{compiler[0]} is missing")
                continue
            self.compiler(compiler, names, folders)
            fragments = compiler + FRAGMENT_FLAGS
            if together and not self.compiler(fragments, together, folders, is_quiet=True):
                # One wrong brace spoils what follows: each fragment for itself says which it is.
                alone = [(f"fragment-{at}.{language}", prelude + part) for at, part in enumerate(parts)]
                if self.compiler(fragments, self.written(alone), folders):
                    self.fault("docs", 1, f"{compiler[0]}: fragments of {language} compile alone, but not together")

    def written(self, sources):
        """Writes files below `work` and returns their paths."""
        paths = []
        for name, text in sources:
            paths.append(os.path.join(self.work, name))
            with open(paths[-1], "w", encoding="utf-8") as out:
                out.write(text)
        return paths

    def headers(self):
        """A folder with links to all headers, made by the first of the threads that compile."""
        headers = os.path.join(self.work, "include")
        with self.linking:
            if not os.path.isdir(headers):
                os.makedirs(os.path.join(headers, "kvtier"))
                for folder, end in (("include/kvtier", ".h"), ("bindings/cpp", ".hpp")):
                    for path in files(os.path.join(self.root, folder), (end,)):
                        link = os.path.join(headers, "kvtier", os.path.basename(path))
                        if not os.path.lexists(link):
                            os.symlink(path, link)
        return headers

    def compiler(self, compiler, paths, folders, is_quiet=False):
        """Runs a compiler on files and returns whether it succeeds; `is_quiet` reports no errors."""
        if not paths:
            return True
        command = compiler + FLAGS + [f"-I{self.headers()}"] + [f"-I{folder}" for folder in folders] + paths
        result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
        if result.returncode == 0 or is_quiet:
            return result.returncode == 0
        found = re.findall(r"^([^\n:]+):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", result.stderr, re.M)
        for path, line, text in found:
            self.fault(os.path.relpath(path, self.root) if path.startswith(self.root) else path, int(line),
                       f"{compiler[0]}: {text}")
        if not found:
            self.fault("docs", 1, f"{compiler[0]}: {result.stderr.strip()[:400]}")
        return False

    def python(self, page, block):
        """Python: parsed; names of the packages of kvtier exist."""
        text = "\n".join(re.sub(r"^(>>> |\.\.\. )", "", line) for line in block.text.split("\n"))
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            return self.fault(page, block.line + (error.lineno or 1) - 1, f"python: {error.msg}")
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if self.module(page, block, node, alias.name) is not None:
                        modules[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else \
                            alias.name.split(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = self.module(page, block, node, node.module)
                for alias in node.names if names is not None else []:
                    if alias.name not in names and alias.name != "*":
                        self.fault(page, block.line + node.lineno - 1, f"{node.module} has no '{alias.name}'")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                name = modules[node.value.id]
                names = self.module(page, block, node, name)
                if names is not None and node.attr not in names:
                    self.fault(page, block.line + node.lineno - 1, f"{name} has no '{node.attr}'")

    def module(self, page, block, node, name):
        """The names in a module of kvtier; None for other modules."""
        if not re.match(r"kvtier\b|kvtier_", name):
            return None
        first, *rest = name.split(".")
        places = [os.path.join(self.root, "bindings", folder, first)
                  for folder in sorted(os.listdir(os.path.join(self.root, "bindings")))]
        folder = next((place for place in places if os.path.isdir(place)), None)
        if folder is None:
            self.fault(page, block.line + node.lineno - 1, f"there is no package {first}")
            return None
        path = os.path.join(folder, *rest)
        source = path + ".py" if os.path.isfile(path + ".py") else os.path.join(path, "__init__.py")
        if not os.path.isfile(source):
            self.fault(page, block.line + node.lineno - 1, f"there is no module {name}")
            return None
        return defined(source)

    def json(self, page, block):
        """JSON: one value, or one a line."""
        try:
            json.loads(block.text)
        except ValueError as error:
            try:
                for line in filter(str.strip, block.text.split("\n")):
                    json.loads(line)
            except ValueError:
                self.fault(page, block.line, f"json: {error}")

    def yaml(self, page, block):
        """YAML, and the metrics in it."""
        try:
            import yaml  # pylint: disable=import-outside-toplevel
        except ImportError:
            return self.fault("docs/check.py", 1, "the package python3-yaml is missing")
        try:
            list(yaml.safe_load_all(block.text))
        except yaml.YAMLError as error:
            self.fault(page, block.line, f"yaml: {' '.join(str(error).split())}")
        return self.promql(page, block)

    def promql(self, page, block):
        """Metrics are those of docs/reference/metrics.md."""
        table = self.pages.get("docs/reference/metrics.md")
        metrics = set(re.findall(r"`(kvtier_\w+)`", table.text)) if table else set()
        packages = {os.path.basename(path) for binding in os.scandir(os.path.join(self.root, "bindings"))
                    if binding.is_dir() for path in os.listdir(binding.path)}
        for at, line in enumerate(block.text.split("\n")):
            for name in re.findall(r"\bkvtier_\w+", line.split("#")[0]):
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                if name not in metrics and base not in metrics and name not in packages:
                    self.fault(page, block.line + at, f"'{name}' is no metric of docs/reference/metrics.md")
        brackets = re.sub(r'"[^"]*"', "", block.text)
        if any(brackets.count(a) != brackets.count(b) for a, b in ("()", "[]", "{}")):
            self.fault(page, block.line, f"{block.language}: brackets are not balanced")

    def cmake(self, page, block):
        """CMake: brackets are balanced."""
        text = re.sub(r'#[^\n]*|"[^"]*"', "", block.text)
        if text.count("(") != text.count(")"):
            self.fault(page, block.line, "cmake: brackets are not balanced")

    def specs(self, blocks):
        """Specs of blocks, and specs of stores in texts of programs, by the library's own parsers."""
        specs = []
        for page, block in blocks:
            for at, line in enumerate(block.text.split("\n")):
                if block.language == "spec" and line.strip():
                    specs.append((page, block.line + at, line.strip()))
                elif block.language in ("c", "cpp", "python"):
                    for text in SPEC_TEXT.findall(line):
                        text = re.sub(r"\\(.)", r"\1", text)
                        if "%" not in text and text.count("(") == text.count(")") and not re.search(r"\{\w+\}", text):
                            specs.append((page, block.line + at, text))
        if not specs:
            return
        lines = "\n".join(spec.replace("\n", " ") for _, _, spec in specs) + "\n"
        result = self.tool(["spec", "--json"], lines)
        if result is None:
            return
        answers = [json.loads(line) for line in result.stdout.splitlines()]
        if len(answers) != len(specs):
            return self.fault("docs", 1, f"kvtier spec: {len(specs)} specs, {len(answers)} answers: {result.stderr}")
        for (page, line, spec), answer in zip(specs, answers):
            # A page may show a mistake with the message that it causes.
            if "error" in answer and answer["error"] not in self.pages[page].text:
                self.fault(page, line, f"{spec}: {answer['error']}")

    def configurations(self, blocks):
        """TOML; where all keys are those of a store's configuration, the tool reads it."""
        table = self.pages.get("docs/reference/configuration.md")
        keys = set(re.findall(r"^\| `([\w]+)[.`]", table.text, re.M)) if table else set()
        for number, (page, block) in enumerate(blocks):
            try:
                parsed = tomllib.loads(block.text)
            except tomllib.TOMLDecodeError as error:
                self.fault(page, block.line, f"toml: {error}")
                continue
            if parsed and set(parsed) <= keys:
                path = self.written([(f"configuration-{number}.toml", block.text)])[0]
                result = self.tool(["config", path], "")
                if result is not None and result.returncode:
                    self.fault(page, block.line, result.stderr.strip().split(":", 2)[-1])

    def tool(self, args, text):
        """Runs `kvtier`."""
        if not os.access(self.options.kvtier, os.X_OK):
            self.fault("docs/check.py", 1, f"{self.options.kvtier} is missing: build it, or name it with --kvtier")
            return None
        return subprocess.run([self.options.kvtier, *args], input=text, capture_output=True, text=True, check=False)

    # ---- command lines

    def shell(self, blocks):
        """Shell: bash parses it, and command lines of the tools are checked against their help."""
        for page, block in blocks:
            text = re.sub(r"^\$ ", "", block.text, flags=re.M)
            result = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
            if result.returncode:
                found = re.search(r"line (\d+): (.*)", result.stderr)
                line = int(found[1]) - 1 if found else 0
                self.fault(page, block.line + line, f"bash: {found[2] if found else result.stderr.strip()}")
                continue
            for at, line in commands(text):
                self.command_line(page, block.line + at, line)

    def command_spans(self):
        """Command lines of the tools in spans of code."""
        for page, one in self.pages.items():
            for line, code in one.spans:
                if re.match(r"kvtier(-bench)? [a-z-]", code):
                    self.words(page, line, re.sub(r"['\"]", "", code).split())

    def command_line(self, page, number, line):
        """The commands of a line of a script."""
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
            lexer.whitespace_split = True
            tokens = list(lexer)
        except ValueError:
            return
        command = []
        for token in [*tokens, ";"]:
            if token and set(token) <= set(";&|()"):
                self.words(page, number, command)
                command = []
            else:
                command.append(token)

    def words(self, page, number, words):
        """A command: its words after assignments and wrappers."""
        while words and (re.match(r"\w+=", words[0]) or words[0] in ("sudo", "time", "exec", "!", "if", "then", "do")):
            words = words[1:]
        if words[:2] == ["cargo", "run"]:
            if "--" not in words:
                return
            before, after = words[:words.index("--")], words[words.index("--") + 1:]
            chosen = [before[at + 1] for at, word in enumerate(before[:-1]) if word in ("-p", "--bin")]
            words = [chosen[0] if chosen else "kvtier", *after]
        if words and os.path.basename(words[0]) in ("kvtier", "kvtier-bench"):
            self.arguments(page, number, os.path.basename(words[0]), words[1:])

    def arguments(self, page, number, name, words):
        """The arguments of a tool: commands and options that its help lists."""
        path, skip = (name,), False
        for word in words:
            commands_, options = self.help(path)
            if skip:
                skip = False
            elif word.startswith("--") and word != "--":
                option = re.match(r"--[a-z0-9-]*", word)[0]
                if option not in options:
                    return self.fault(page, number, f"{' '.join(path)} has no option {option}")
                skip = options[option] and "=" not in word
            elif word in (">", "<", ">>", "2>", "2>&1", "--") or word.startswith("#"):
                return
            elif commands_ and not word.startswith("-"):
                if not re.fullmatch(r"[a-z][a-z0-9-]*", word):
                    return
                if word in commands_:
                    path += (word,)
                elif name == "kvtier" or len(path) > 1:
                    return self.fault(page, number, f"{' '.join(path)} has no command '{word}'")

    def help(self, path):
        """The commands and options of a tool or of one of its commands; an option with whether it takes a value."""
        known = self.__dict__.setdefault("_help", {})
        if path not in known:
            program = self.options.kvtier if path[0] == "kvtier" else self.options.bench
            text = ""
            if os.access(program, os.X_OK):
                text = subprocess.run([program, *path[1:], "--help"], capture_output=True, text=True, check=False).stdout
            else:
                self.fault("docs/check.py", 1, f"{program} is missing")
            listed = re.search(r"^Commands:\n((?:  .*\n|\n)*)", text, re.M)
            names = set(re.findall(r"^  ([a-z][\w-]*)", listed[1], re.M)) if listed else set()
            found = re.findall(r"^\s+(?:-\w, )?(--[a-z0-9-]+)([ =]<)?", text, re.M)
            known[path] = names, {option: bool(value) for option, value in found}
        return known[path]

    # ---- the built book

    def book(self):
        """Links, anchors and pictures of the HTML; its anchors are those that the checks of pages assume."""
        out = os.path.abspath(self.options.book)
        pages = {}
        for path in files(out, (".html",)):
            with open(path, encoding="utf-8", errors="replace") as text:
                pages[os.path.relpath(path, out)] = Html(text.read())
        for name, page in pages.items():
            for tag, target in page.targets:
                if re.match(r"([a-z][a-z0-9+.-]*:)?//", target) and tag != "a":
                    self.fault(f"{out}/{name}", 1, f"the page loads {target}: nothing may come from elsewhere")
                elif not name.startswith("reference/c-api/"):
                    self.html_link(out, name, target, pages)
        for source, one in self.pages.items():
            html_name = os.path.relpath(source, "docs")[:-3] + ".html"
            if source == "docs/SUMMARY.md":
                continue
            if html_name not in pages:
                self.fault(source, 1, f"the book has no {html_name}")
            else:
                for anchor in one.anchors() - pages[html_name].ids:
                    self.fault(source, 1, f"the book has no anchor #{anchor}: docs/tools/markdown.py makes another")

    def html_link(self, out, name, target, pages):
        """A link or a picture of a page of the book."""
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            return
        path, _, fragment = urllib.parse.unquote(target).partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        if os.path.isdir(os.path.join(out, place)):
            place = posixpath.join(place, "index.html")
        if not os.path.exists(os.path.join(out, place)):
            self.fault(f"{out}/{name}", 1, f"dead link in the book: {target}")
        elif fragment and place in pages and fragment not in pages[place].ids:
            self.fault(f"{out}/{name}", 1, f"dead anchor in the book: {target}")


class Html(html.parser.HTMLParser):
    """The ids, links and pictures of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.targets = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Takes the attributes of an element."""
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.ids.add(value)
            elif (tag, key) in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")) and value:
                self.targets.append((tag, value))


def files(folder, ends):
    """The files below a folder whose names end so."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (os.path.join(place, name) for name in sorted(names) if name.endswith(ends))


def defined(source):
    """The names that a Python module defines or imports, with its submodules."""
    with open(source, encoding="utf-8") as text:
        tree = ast.parse(text.read())
    names = {"__version__", "__file__", "__name__", "__doc__"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if os.path.basename(source) == "__init__.py":
        folder = os.path.dirname(source)
        names.update(name.removesuffix(".py") for name in os.listdir(folder)
                     if name.endswith(".py") or os.path.isdir(os.path.join(folder, name)))
    return names


def commands(text):
    """The lines of a script, continued ones as one, without here-documents; each with its number from 0."""
    lines, at, end = text.split("\n"), 0, None
    while at < len(lines):
        start, line = at, lines[at]
        at += 1
        if end is not None:
            end = None if line.strip() == end else end
            continue
        while line.endswith("\\") and at < len(lines):
            line = line[:-1] + " " + lines[at]
            at += 1
        here = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line)
        end = here[1] if here else None
        yield start, re.sub(r"(^|\s)#.*$", "", line)


# ---- the checks prove that they can fail

SOUND = {
    "docs/SUMMARY.md": "# Contents\n\n- [One](one.md)\n- [Two](two.md)\n",
    "docs/two.md": "# Two\n\nFor users.\n\n## Some `code`, and **more**\n\nText.\n",
    "docs/one.md": """# One

For users: [two](two.md#some-code-and-more), [a file](../examples/sound.c).

![A picture](pictures/sound.svg)

```c
kvt_error_free(&err);
```

```c
{{#include ../examples/sound.c}}
```

```cpp
#include <kvtier/kvtier.hpp>
int main() { return 0; }
```

```python
import kvtier
print(kvtier.version())
```

```sh
kvtier lab compare --trace chat.kvtrace --policies lru,belady \\
    --json | cat
```

```json
{"a": 1}
```

```yaml
a: [1, 2]
```

```toml
host = "1GiB"
```

```spec
store(host=1GiB, policy=lru)
```

```promql
rate(kvtier_gets_total[5m])
```

```text
anything (
```

See `kvt_store_open`, `KVT_E_*` and `kvtier fsck DIR --json`.
""",
    "docs/pictures/sound.svg": "<svg xmlns='http://www.w3.org/2000/svg'/>",
    "examples/sound.c": "#include <kvtier/kvtier.h>\nint main(void) { return 0; }\n",
}

# What is planted: a title, the page, and words of the report about it.
FAULTS = [
    ("dead link", "[two](three.md)", "dead link: three.md"),
    ("dead link outside of docs", "[a file](../examples/gone.c)", "dead link"),
    ("dead anchor", "[two](two.md#some-code)", "dead anchor"),
    ("dead anchor of the page itself", "[up](#above)", "dead anchor"),
    ("absolute link", "[two](/two.md)", "are relative"),
    ("link to the built page", "[two](two.html)", "two.html: link to the page"),
    ("missing picture", "![A picture](pictures/gone.svg)", "missing picture"),
    ("picture of another site", "![A picture](https://example.org/a.svg)", "part of the manual"),
    ("picture without a description", "![](pictures/sound.svg)", "needs a description"),
    ("wrong C in a fragment", "```c\nkvt_error_free(&ern);\n```", ":6: gcc: 'ern' undeclared"),
    ("wrong C, by clang", "```c\nkvt_error_free(&ern);\n```", ":6: clang: use of undeclared"),
    ("unclosed fragment", "```c\nif (err) {\n```", "expected"),
    ("warning in C", "```c\nif (count = 1) {\n}\n```", "parentheses"),
    ("wrong C in a file", "```c\n{{#include ../examples/wrong.c}}\n```", ""),
    ("wrong C++", "```cpp\n#include <vector>\nint main() { return; }\n```", "return"),
    ("missing file to include", "```c\n{{#include ../examples/gone.c}}\n```", "missing file"),
    ("missing part of a file", "```c\n{{#include ../examples/sound.c:gone}}\n```", "no anchor 'gone'"),
    ("wrong Python", "```python\nprint((1)\n```", "python:"),
    ("unknown name in Python", "```python\nimport kvtier\nkvtier.versoin()\n```", "no 'versoin'"),
    ("unknown import in Python", "```python\nfrom kvtier import Stoer\n```", "no 'Stoer'"),
    ("unknown module of Python", "```python\nimport kvtier.gone\n```", "no module"),
    ("unknown package of Python", "```python\nimport kvtier_gone\n```", "no package kvtier_gone"),
    ("wrong shell", "```sh\necho 1 | | cat\n```", "bash:"),
    ("unknown command", "```sh\nkvtier lab compair --json\n```", "no command 'compair'"),
    ("unknown option", "```sh\nkvtier lab compare --trace x \\\n    --polices lru\n```", "no option --polices"),
    ("unknown option of the bench", "```sh\nA=1 kvtier-bench store --qick\n```", "no option --qick"),
    ("unknown option in prose", "Run `kvtier fsck DIR --jsn`.", "no option --jsn"),
    ("wrong JSON", "```json\n{\"a\": }\n```", "json:"),
    ("wrong YAML", "```yaml\na: [1, 2\n```", "yaml:"),
    ("wrong TOML", "```toml\nhost = 1GiB\n```", "toml:"),
    ("wrong CMake", "```cmake\nfind_package(kvtier\n```", "cmake: brackets"),
    ("wrong configuration", "```toml\nhost = \"1Gib\"\n```", "GiB"),
    ("wrong spec", "```spec\nstore(policy=lru\n```", "expected"),
    ("unknown parameter of a spec", "```spec\nlru\nstore(polcy=lru)\n```", ":7: store(polcy=lru)"),
    ("wrong spec in C", '```c\nputs("store(polcy=lru)");\n```', "polcy"),
    ("wrong PromQL", "```promql\nrate(kvtier_gets_total[5m]\n```", "promql: brackets"),
    ("unknown metric", "```promql\nrate(kvtier_got_total[5m])\n```", "no metric"),
    ("unknown metric in YAML", "```yaml\nexpr: kvtier_got_total > 1\n```", "no metric"),
    ("unknown language", "```console\n$ ls\n```", "a block of 'console'"),
    ("unclosed block", "```text\nanything", "not closed"),
    ("unknown name of C", "Call `kvt_store_opne`.", "kvt_store_opne"),
    ("unknown prefix of C", "One of `KVT_EE_*`.", "KVT_EE_"),
]

# The same in other files: a title, the file, its text, and words of the report.
FILES = [
    ("page that is not listed", "docs/alone.md", "# Alone\n", "docs/alone.md:1: docs/SUMMARY.md does not list"),
    ("dead link outside of the manual", "README.md", "[two](docs/three.md)\n", "README.md:1: dead link"),
    ("dead anchor outside of the manual", "CONTRIBUTING.md", "[two](docs/two.md#x)\n", "CONTRIBUTING.md:1: dead anchor"),
    ("listed page that is missing", None, "- [Gone](gone.md)\n", "gone.md does not exist"),
    ("page that is listed twice", None, "- [Two](two.md)\n", "two.md is listed twice"),
    ("page without a title", "docs/two.md", "Two\n", "docs/two.md:1: a page begins"),
    ("picture that is not shown", "docs/pictures/alone.svg", "<svg xmlns='http://www.w3.org/2000/svg'/>",
     "alone.svg:1: no page shows"),
    ("broken picture", "docs/pictures/broken.svg", "<svg>", "broken.svg:1: not XML"),
    ("wrong C in a file", "examples/wrong.c", "#include <kvtier/kvtier.h>\nint main(void) { return nothing; }\n",
     "examples/wrong.c:2: gcc"),
]

# A built book, and what is planted in it.
BOOK = {"one.html": '<h1 id="one">One</h1><a href="two.html#two">', "two.html": '<h1 id="two">Two</h1><img src="a.svg">',
        "a.svg": ""}
BOOK_FAULTS = [
    ("dead link in the book", '<a href="gone.html">', "dead link in the book: gone.html"),
    ("dead anchor in the book", '<a href="two.html#one">', "dead anchor in the book: two.html#one"),
    ("missing picture in the book", '<img src="gone.svg">', "dead link in the book: gone.svg"),
    ("script of another site", '<script src="https://example.org/a.js"></script>', "nothing may come from elsewhere"),
    ("page without its anchor", '<h1 id="other">', "no anchor #one"),
    ("page that is not built", None, "the book has no one.html"),
]


def checked_book(options, planted):
    """The faults in a built book whose first page is BOOK's, or has what is planted; without the page for None."""
    with tempfile.TemporaryDirectory() as out:
        for name, text in {**BOOK, "one.html": planted}.items():
            if text is not None:
                with open(os.path.join(out, name), "w", encoding="utf-8") as page:
                    page.write(text)
        check = Check(argparse.Namespace(**{**vars(options), "work": out, "book": out}))
        check.pages = {"docs/one.md": markdown.Page("# One\n"), "docs/two.md": markdown.Page("# Two\n")}
        check.book()
        return [text for _, _, text in check.faults]


def checked(options, sources):
    """The faults in a manual of these files."""
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as work:
        for name in ("include", "bindings"):
            os.symlink(os.path.join(os.path.abspath(options.root), name), os.path.join(root, name))
        for name, text in sources.items():
            os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
            with open(os.path.join(root, name), "w", encoding="utf-8") as out:
                out.write(text)
        check = Check(argparse.Namespace(**{**vars(options), "root": root, "work": work, "book": None}))
        check.check()
        return [f"{page}:{line}: {text}" for page, line, text in check.faults]


def self_test(options):
    """Checks a sound manual and one with planted faults; returns the number of faults that are not found."""
    sources = dict(SOUND)
    for name in ("docs/checks/prelude.h", "docs/reference/metrics.md", "docs/reference/configuration.md"):
        with open(os.path.join(os.path.abspath(options.root), name), encoding="utf-8") as source:
            # The generated pages without their links to other pages.
            sources[name] = re.sub(r"\]\([^)]*\)", "]", source.read())
    sources["docs/SUMMARY.md"] += "- [A](reference/metrics.md)\n- [B](reference/configuration.md)\n"
    found = checked(options, sources)
    for one in found:
        print(f"the sound manual has a fault: {one}")
    wrong = len(found)
    for number, (_, text, _) in enumerate(FAULTS):
        sources["docs/SUMMARY.md"] += f"- [F](fault-{number}.md)\n"
        sources[f"docs/fault-{number}.md"] = f"# Fault\n\nFor users.\n\n{text}\n"
    for _, name, text, _ in FILES:
        if name is None:
            sources["docs/SUMMARY.md"] = sources["docs/SUMMARY.md"].replace("- [A]", f"{text}- [A]", 1)
        else:
            sources[name] = text
    found = checked(options, sources)
    for number, (title, _, words) in enumerate(FAULTS):
        reports = [one for one in found if one.startswith(f"docs/fault-{number}.md:")]
        if words and not any(words in one for one in reports):
            print(f"not found: {title}; reported was:", *reports, sep="\n  ")
            wrong += 1
    for title, _, _, words in FILES:
        if not any(words in one for one in found):
            print(f"not found: {title}")
            wrong += 1
    for text in checked_book(options, BOOK["one.html"]):
        print(f"the sound book has a fault: {text}")
        wrong += 1
    for title, text, words in BOOK_FAULTS:
        if not any(words in one for one in checked_book(options, text)):
            print(f"not found: {title}")
            wrong += 1
    planted = sum(bool(words) for _, _, words in FAULTS) + len(FILES) + len(BOOK_FAULTS)
    print(f"{planted} faults planted, {wrong} not found")
    return wrong


def main():
    """Runs as the command line asks."""
    parser = argparse.ArgumentParser(usage=__doc__)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    target = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(root, "target")), "debug")
    parser.add_argument("--root", default=root)
    parser.add_argument("--kvtier", default=os.path.join(target, "kvtier"))
    parser.add_argument("--bench", default="")
    parser.add_argument("--book")
    parser.add_argument("--work")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    options.bench = options.bench or os.path.join(os.path.dirname(options.kvtier), "kvtier-bench")
    if options.self_test:
        sys.exit(min(self_test(options), 1))
    with tempfile.TemporaryDirectory() as work:
        options.work = options.work or work
        os.makedirs(options.work, exist_ok=True)
        check = Check(options)
        faults = check.run()
    blocks = ", ".join(f"{count} {language}" for language, count in sorted(check.counts.items()))
    print(f"{len(check.pages)} pages, {blocks}: {faults} faults")
    sys.exit(min(faults, 1))


if __name__ == "__main__":
    main()
