//! Why a connection is of no use, and what that means.

use crate::io::link::Lost;
use crate::tier::remote::Trouble;
use crate::tier::remote::s3::http::Nonsense;

/// Why a connection is of no use.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What it means for an item.
    pub trouble: Trouble,
    /// What it is, for people.
    pub words: String,
    /// It was there for a request before this one, and had ended when this one came.
    pub is_stale: bool,
    /// It may go well at once on another connection.
    pub can_pass: bool,
}

/// A reply that ends too early.
pub fn short() -> Fault {
    let words = "the reply ended before its time".to_string();
    Fault { trouble: Trouble::Nonsense, words, is_stale: false, can_pass: true }
}

impl Fault {
    /// The connection is gone.
    pub fn lost(words: String) -> Fault {
        Fault { trouble: Trouble::Gone, words, is_stale: false, can_pass: true }
    }
}

impl From<Lost> for Fault {
    fn from(lost: Lost) -> Fault {
        let words = lost.to_string();
        match lost {
            Lost::Unsafe(_) => {
                Fault { trouble: Trouble::Untrusted, words, is_stale: false, can_pass: false }
            }
            Lost::Late | Lost::Gone(_) => Fault::lost(words),
        }
    }
}

impl From<Nonsense> for Fault {
    fn from(nonsense: Nonsense) -> Fault {
        let words = format!("the server gave {}", nonsense.0);
        Fault { trouble: Trouble::Nonsense, words, is_stale: false, can_pass: false }
    }
}
