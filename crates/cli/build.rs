//! Tells the tool which profile of cargo it is built with.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // cargo says only `release` for every profile that inherits from it; its directory has the name:
    // TARGET/PROFILE/build/PACKAGE-HASH/out.
    let out = std::env::var("OUT_DIR").unwrap_or_default();
    let profile = Path::new(&out).ancestors().nth(3).and_then(Path::file_name);
    let profile = profile.map_or("unknown".into(), |name| name.to_string_lossy());
    println!("cargo:rustc-env=KVTIER_PROFILE={profile}");
}
