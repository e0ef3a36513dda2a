//! Link arguments of the shared object, and its soname beside it. Nothing is generated here:
//! the header is committed, and a test regenerates and compares it.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    let major = std::env::var("CARGO_PKG_VERSION_MAJOR").unwrap_or_default();
    let minor = std::env::var("CARGO_PKG_VERSION_MINOR").unwrap_or_default();
    // While the major version is 0 every minor may break, so the minor is part
    // of the soname.
    let soname = if major == "0" { format!("0.{minor}") } else { major };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libkvtier.so.{soname}");
    // Worker threads and thread-local destructors outlive a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,relro,-z,now");
    // The unwinder sits in libgcc_s; nothing else is dragged in by default flags.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--as-needed");
    name_beside(&format!("libkvtier.so.{soname}"));
}

/// A program that was linked to `target/PROFILE/libkvtier.so` looks for the soname when it starts:
/// a link of that name stands beside the library. Cargo has no other place to ask for one, and a
/// link that cannot be made fails no build.
fn name_beside(soname: &str) {
    let out = std::env::var("OUT_DIR").unwrap_or_default();
    // TARGET/PROFILE/build/PACKAGE-HASH/out
    let Some(profile) = Path::new(&out).ancestors().nth(3) else { return };
    let link = profile.join(soname);
    if link.symlink_metadata().is_err() {
        let _ = std::os::unix::fs::symlink("libkvtier.so", link);
    }
}
