//! Passes the cargo profile of the build to the tool.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // For every profile that inherits from `release`, cargo reports `release`. The name is in the
    // path: TARGET/PROFILE/build/PACKAGE-HASH/out.
    let out = std::env::var("OUT_DIR").unwrap_or_default();
    let profile = Path::new(&out).ancestors().nth(3).and_then(Path::file_name);
    let profile = profile.map_or("unknown".into(), |name| name.to_string_lossy());
    println!("cargo:rustc-env=KVTIER_PROFILE={profile}");
}
