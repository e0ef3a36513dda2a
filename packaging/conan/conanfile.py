"""Conan 2 recipe of kvtier. It builds the source archive that packaging/build.sh makes:

    conan create packaging/conan -c user.kvtier:source=OUT/kvtier-0.1.0-vendored.tar.gz

`user.kvtier:source` is a path or an address, `user.kvtier:sha256` its optional digest. The build needs
cargo (1.89 or newer), a C compiler, and no network. build_type Debug builds the cargo profile `dev`,
every other one `dist`.
"""

import os

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.files import copy, get, rm, rmdir

required_conan_version = ">=2.0"


class KvtierConan(ConanFile):
    name = "kvtier"
    version = "0.1.0"
    license = "Apache-2.0"
    description = "Tiered KV-cache storage, weight streaming and eviction policies for LLM inference engines"
    topics = ("llm", "kv-cache", "inference")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "tls": [True, False], "seal": [True, False], "s3": [True, False]}
    default_options = {"shared": True, "tls": False, "seal": False, "s3": False}

    def configure(self):
        # The interface is C: no C++ library takes part.
        self.settings.rm_safe("compiler.cppstd")
        self.settings.rm_safe("compiler.libcxx")

    def validate(self):
        if self.settings.os != "Linux" or self.settings.arch not in ("x86_64", "armv8"):
            raise ConanInvalidConfiguration("kvtier runs on Linux on x86_64 and armv8")

    def source(self):
        source = self.conf.get("user.kvtier:source", check_type=str)
        if not source:
            raise ConanInvalidConfiguration(
                "the source archive is not named: pass -c user.kvtier:source=PATH, where PATH is a "
                "kvtier-VERSION-vendored.tar.gz of packaging/build.sh")
        address = source if "://" in source else f"file://{os.path.abspath(source)}"
        get(self, address, sha256=self.conf.get("user.kvtier:sha256", check_type=str), strip_root=True)

    def build(self):
        profile = "dev" if self.settings.build_type == "Debug" else "dist"
        features = ",".join(["redis", "dir", *(name for name in ("tls", "seal", "s3") if self.options.get_safe(name))])
        script = os.path.join(self.source_folder, "cmake", "build.sh")
        self.run(f'KVTIER_FEATURES={features} CARGO_TARGET_DIR="{self.build_folder}/target" "{script}" '
                 f'"{self.build_folder}/out" {profile}')

    def package(self):
        script = os.path.join(self.source_folder, "cmake", "install.sh")
        self.run(f'DESTDIR= "{script}" --prefix "{self.package_folder}" --from "{self.build_folder}/out"')
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        # Conan writes these for its generators.
        rmdir(self, os.path.join(self.package_folder, "lib", "cmake"))
        rmdir(self, os.path.join(self.package_folder, "lib", "pkgconfig"))
        rm(self, "*.a" if self.options.shared else "*.so*", os.path.join(self.package_folder, "lib"))

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "kvtier")
        self.cpp_info.set_property("cmake_target_name", "kvtier::kvtier")
        self.cpp_info.set_property("pkg_config_name", "kvtier")
        self.cpp_info.libs = ["kvtier"]
        if not self.options.shared:
            self.cpp_info.system_libs = ["gcc_s", "util", "rt", "pthread", "m", "dl"]
