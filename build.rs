//! Link arguments of the shared object. Nothing is generated here: the header
//! is committed, and a test regenerates and compares it.

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
}
