//! How a connection begins: who we are, and what we want of the server.

use crate::tier::remote::Trouble;
use crate::tier::remote::redis::Settings;
use crate::tier::remote::redis::errors::{self, Said};
use crate::tier::remote::redis::resp::{Nonsense, Value};
use crate::tier::remote::redis::url::Address;
use crate::tier::remote::redis::wire::{Expect, Fault, State, Wire};
use crate::tier::remote::redis::work::{window_of, words};

impl Wire {
    /// Says who we are.
    pub(super) fn greet(&mut self, settings: &Settings) {
        self.state = State::Greeting;
        self.can_read = true;
        self.out.command(if settings.password.is_some() { 7 } else { 4 });
        self.out.word(b"HELLO");
        self.out.word(b"3");
        if let Some(password) = &settings.password {
            self.out.word(b"AUTH");
            self.out.word(settings.user.as_deref().unwrap_or("default").as_bytes());
            self.out.word(password.bytes());
        }
        self.out.word(b"SETNAME");
        self.out.word(b"kvtier");
        self.expect.push_back(Expect::Hello);
    }

    /// Goes on after an answer to the greeting.
    pub(super) fn greeted(
        &mut self,
        to: &Expect,
        value: Value,
        settings: &Settings,
    ) -> Result<(), Fault> {
        match (to, &value) {
            (Expect::Hello, Value::Error(said)) if is_refused(said) => {
                match (&settings.password, &settings.user) {
                    (Some(password), Some(user)) => {
                        words(&mut self.out, &[b"AUTH", user.as_bytes(), password.bytes()]);
                    }
                    (Some(password), None) => words(&mut self.out, &[b"AUTH", password.bytes()]),
                    (None, _) => {}
                }
                if settings.password.is_some() {
                    self.expect.push_back(Expect::Auth);
                }
                words(&mut self.out, &[b"CLIENT", b"SETNAME", b"kvtier"]);
                self.expect.push_back(Expect::Name);
                self.select(settings);
            }
            // What a server says of a password may repeat it.
            (Expect::Auth, Value::Error(said)) => {
                let words = format!("the user or the password is refused: {}", errors::code(said));
                return Err(Fault { trouble: Trouble::Denied, words });
            }
            (Expect::Hello | Expect::Select, Value::Error(said)) => {
                let here = Address { host: "".into(), port: 0 };
                let trouble = match errors::meaning(said, &here) {
                    Said::Trouble(trouble) => trouble,
                    _ => Trouble::Later,
                };
                let words = format!("the greeting is refused: {}", errors::code(said));
                return Err(Fault { trouble, words });
            }
            (Expect::Hello, Value::List(_)) => {
                self.hello = value;
                self.select(settings);
            }
            (Expect::Hello, _) => {
                return Err(self.nonsense(Nonsense("no answer to a greeting")));
            }
            _ => {}
        }
        if self.expect.is_empty() {
            self.state = State::Ready;
            self.window = window_of(self.link.round_trip_ns());
        }
        Ok(())
    }

    fn select(&mut self, settings: &Settings) {
        if settings.reads_replicas {
            // One that refuses sends us to its master each time.
            words(&mut self.out, &[b"READONLY"]);
            self.expect.push_back(Expect::Follower);
        }
        if settings.db > 0 {
            words(&mut self.out, &[b"SELECT", settings.db.to_string().as_bytes()]);
            self.expect.push_back(Expect::Select);
        }
    }
}

/// Whether a server cannot be greeted in this way, but maybe in the old one.
fn is_refused(said: &[u8]) -> bool {
    errors::is_unknown_command(said) || said.starts_with(b"NOPROTO") || said.starts_with(b"NOPERM")
}
