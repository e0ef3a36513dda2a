//! Removes temporary files of dead writers from a shared directory. Each step covers a few folders,
//! so that no request waits for it.

use crate::io::shared_dir::{Folder, Number};
use crate::tier::remote::dir::{TEMPORARY, hex};

/// Age in seconds after which a temporary file has no writer any more.
const OLD_S: i64 = 24 * 3600;
/// Folders and names that a step covers.
const FOLDERS: usize = 64;
const NAMES: usize = 16 << 10;
/// Number of folders.
const ALL: u32 = 1 << 16;

/// Position of the sweep.
#[derive(Default)]
pub(super) struct Sweep {
    next: Option<u32>,
}

impl Sweep {
    /// Continues in the folder of a version until `late`. `now_s` is a time by the server's clock,
    /// to which ages are compared. A later step repeats what fails.
    pub fn step(&mut self, base: &Folder, now_s: i64, late: impl Fn() -> bool) {
        let mut names = NAMES;
        if self.next.is_none() {
            // The folder itself has the files of greetings. Clients begin with different folders.
            let _ = clean(base, now_s, &mut names);
            self.next = Some((now_s as u32).wrapping_mul(0x9E37_79B9) % ALL);
        }
        let mut next = self.next.unwrap_or(0);
        let (mut folders, mut above): (usize, Option<(u32, Option<Folder>)>) = (0, None);
        for _ in 0..ALL {
            if folders >= FOLDERS || names == 0 || late() {
                break;
            }
            let [first, second] = [(next >> 8) as u8, next as u8];
            if above.as_ref().is_none_or(|(of, _)| *of != next >> 8) {
                above = Some((next >> 8, base.folder(&hex(first)).ok()));
                folders += 1;
            }
            let Some((_, Some(folder))) = &above else {
                // None of its folders exists.
                next = (next | 0xFF).wrapping_add(1) % ALL;
                continue;
            };
            if let Ok(folder) = folder.folder(&hex(second)) {
                folders += 1;
                let _ = clean(&folder, now_s, &mut names);
            }
            next = (next + 1) % ALL;
        }
        self.next = Some(next);
    }
}

/// Removes old temporary files of a folder.
fn clean(folder: &Folder, now_s: i64, names: &mut usize) -> Result<(), Number> {
    let mut old = Vec::new();
    folder.each_name(|name| {
        *names = names.saturating_sub(1);
        if is_temporary(name) {
            old.push(name.to_vec());
        }
        *names > 0
    })?;
    for name in old {
        let facts = folder.facts(&name)?;
        if facts.regular && now_s.saturating_sub(facts.written_s) > OLD_S {
            folder.remove(&name)?;
        }
    }
    Ok(())
}

/// Whether a client made the name.
fn is_temporary(name: &[u8]) -> bool {
    name.strip_prefix(TEMPORARY).is_some_and(|digits| {
        (40..=41).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit)
    })
}
