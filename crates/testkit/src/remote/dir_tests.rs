//! Conformance of the backend for shared directories.

use std::fs;

use kvtier::base::clock::Clock;
use kvtier::tier::remote::dir::{Dir, DirOpts};
use kvtier::tier::remote::name::Prefix;

use crate::remote::conformance::{Opts, conform};

#[test]
fn a_shared_directory_conforms_and_leaves_no_file() {
    for fsync in [false, true] {
        let place = std::env::temp_dir().join(format!("kvtier-dir-{fsync}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&place);
        fs::create_dir(&place).unwrap();
        let prefix = Prefix::new("pre").unwrap();
        let remote = Dir::new(DirOpts { path: place.clone(), prefix, fsync, clock: Clock::real() });
        let opts = Opts { largest_bytes: 5 << 20, ..Opts::default() };
        assert_eq!(conform(&remote, &opts).unwrap().len(), 12);
        assert_eq!(files_below(&place), 0);
        fs::remove_dir_all(&place).unwrap();
    }
}

fn files_below(dir: &std::path::Path) -> usize {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { files_below(&path) } else { 1 }).sum()
}
