//! The remote that a command is given: `redis://HOST[:PORT]`, `dir:PATH`, or a spec as a store's.

use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::base::spec::{Arg, Spec, Value};
use kvtier::base::status::{Error, Result};
use kvtier::fail;
use kvtier::store::spec::StoreSpec;
use kvtier::store::spec::{RemoteSpec, Secrets};
use kvtier::store::state::RemoteConfig;
use kvtier::tier::remote::{Remote, Server};

/// Where secrets are taken from: what stands in a command line others see. Keys of S3 are also
/// where its own tools look for them.
const ENVIRONMENT: [(&str, &[&str]); 5] = [
    ("password", &["KVTIER_REMOTE_PASSWORD"]),
    ("s3.key", &["KVTIER_REMOTE_S3_KEY", "AWS_ACCESS_KEY_ID"]),
    ("s3.secret", &["KVTIER_REMOTE_S3_SECRET", "AWS_SECRET_ACCESS_KEY"]),
    ("s3.token", &["KVTIER_REMOTE_S3_TOKEN", "AWS_SESSION_TOKEN"]),
    ("seal", &["KVTIER_REMOTE_SEAL"]),
];

/// A remote that somebody named.
pub struct Place {
    spec: Spec,
    secrets: Secrets,
}

/// One that answered.
pub struct Opened {
    /// It.
    pub remote: Arc<dyn Remote>,
    /// What a store would do with it.
    pub config: RemoteConfig,
    /// What answered.
    pub server: Server,
}

impl Place {
    /// Reads what was named, and takes secrets from the environment. Nothing of the text is in an
    /// error: it may have a password in it that belongs elsewhere.
    pub fn read(text: &str) -> Result<Place> {
        Place::with(text, |name| std::env::var_os(name).map(OsStringExt::into_vec))
    }

    fn with(text: &str, environment: impl Fn(&str) -> Option<Vec<u8>>) -> Result<Place> {
        let one = |name: &str, key: &str, value: &str| Spec {
            name: name.to_string(),
            args: vec![arg(key, Value::Text(value.to_string()))],
            offset: 0,
        };
        let spec = match text.strip_prefix("dir:") {
            Some(path) => one("dir", "path", path),
            None if is_url(text) => one("redis", "url", text),
            None if text.contains('(') => Spec::parse(text)?,
            None => fail!(
                Spec,
                "a remote is redis://HOST[:PORT], dir:PATH, or a spec such as redis(url=\"...\") or \
                 s3(url=\"...\",bucket=\"...\")"
            ),
        };
        if !["redis", "s3", "dir"].contains(&spec.name.as_str()) {
            fail!(Spec, "the remotes of this tool are redis(...), s3(...) and dir(...)");
        }
        let has = |name: &str| environment(name).is_some_and(|secret| !secret.is_empty());
        let mut secrets = Secrets::default();
        for (name, places) in ENVIRONMENT {
            if name.starts_with("s3.") && spec.name != "s3" {
                continue;
            }
            // A session's token goes with the key that it was given with.
            let others = usize::from(name != "s3.token" || !has("KVTIER_REMOTE_S3_KEY"));
            let mut found = places.iter().take(1 + others).filter_map(|place| environment(place));
            if let Some(secret) = found.find(|secret| !secret.is_empty()) {
                secrets.add(name, &secret)?;
            }
        }
        let place = Place { spec, secrets };
        // What is wrong with it is said before anything is begun.
        RemoteSpec::read(&place.spec)?;
        Ok(place)
    }

    /// The same, with a parameter where it has none of that name.
    pub fn or(mut self, key: &str, value: Value) -> Place {
        if self.spec.args.iter().all(|arg| arg.key != key) {
            self.spec.args.push(arg(key, value));
        }
        self
    }

    /// The same, with a parameter whatever it has.
    fn and(&self, key: &str, value: Value) -> Spec {
        let mut spec = self.spec.clone();
        spec.args.retain(|arg| arg.key != key);
        spec.args.push(arg(key, value));
        spec
    }

    /// What it is, as a spec has it: there are no secrets in it.
    pub fn words(&self) -> String {
        self.spec.to_string()
    }

    /// The store that is described, with this remote. One that does not answer is an error.
    pub fn store(&self, text: &str) -> Result<StoreSpec> {
        let mut spec = Spec::parse(text)?;
        spec.args.push(arg("remote", Value::Spec(self.and("require", yes()))));
        let mut spec = StoreSpec::read(&spec)?;
        spec.secrets = self.secrets.clone();
        Ok(spec)
    }

    /// Opens it, and asks who is there: nobody is an error.
    pub fn open(&self, clock: &Clock) -> Result<Opened> {
        let Some(spec) = RemoteSpec::read(&self.and("require", yes()))? else {
            fail!(Spec, "none is no remote");
        };
        let (remote, config, server) = spec.open(&self.secrets, None, clock).map_err(explain)?;
        Ok(Opened { remote, config, server: server.unwrap_or_default() })
    }
}

/// Says where the tool takes secrets from, where one is missing.
pub fn explain(error: Error) -> Error {
    let message = error.message();
    let wants = ["secret", "NOAUTH", "WRONGPASS", "forbids"];
    if !wants.iter().any(|word| message.contains(word)) {
        return error;
    }
    let places: Vec<&str> = ENVIRONMENT.iter().map(|(_, places)| places[0]).collect();
    let places = places.join(", ");
    Error::new(error.status(), format!("{message} (this tool takes secrets from {places})"))
}

fn is_url(text: &str) -> bool {
    text.starts_with("redis://") || text.starts_with("rediss://")
}

/// A number, as a parameter.
pub fn number(value: f64) -> Value {
    Value::Number(value, String::new())
}

fn yes() -> Value {
    Value::Spec(Spec { name: "true".to_string(), args: Vec::new(), offset: 0 })
}

fn arg(key: &str, value: Value) -> Arg {
    Arg { key: key.to_string(), value, offset: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &str) -> Option<Vec<u8>> {
        None
    }

    #[test]
    fn secrets_come_from_the_environment() {
        let bucket = "s3(url=\"http://127.0.0.1:1\",bucket=\"b\")";
        let own = |name: &str| {
            let is_known = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "KVTIER_REMOTE_S3_KEY"];
            is_known.contains(&name).then(|| name.as_bytes().to_vec())
        };
        let place = Place::with(bucket, own).expect("sound");
        let bytes = |name: &str| place.secrets.get(name).map(|secret| secret.bytes().to_vec());
        assert_eq!(bytes("s3.key"), Some(b"KVTIER_REMOTE_S3_KEY".to_vec()));
        assert_eq!(bytes("s3.secret"), Some(b"AWS_SECRET_ACCESS_KEY".to_vec()));
        assert_eq!((bytes("s3.token"), bytes("seal"), bytes("password")), (None, None, None));
        let token = |name: &str| (name == "AWS_SESSION_TOKEN").then(|| b"of another".to_vec());
        let place = Place::with(bucket, |name| own(name).or_else(|| token(name))).expect("sound");
        assert!(place.secrets.get("s3.token").is_none(), "it is not of this key");
        let place = Place::with(bucket, token).expect("sound");
        assert!(place.secrets.get("s3.token").is_some());
        // What is S3's is nobody else's; what is empty is none.
        let place = Place::with("redis://a", own).expect("sound");
        assert!(place.secrets.get("s3.key").is_none());
        let place = Place::with(bucket, |_| Some(Vec::new())).expect("sound");
        assert!(place.secrets.get("s3.key").is_none());
    }

    #[test]
    fn a_remote_is_named_shortly_or_in_full() {
        for (text, words) in [
            ("redis://a:7000", "redis(url=\"redis://a:7000\")"),
            ("dir:/mnt/k\"v", "dir(path=\"/mnt/k\\\"v\")"),
            ("dir(path=\"x\",timeout=9)", "dir(path=\"x\",timeout=9)"),
        ] {
            let place = Place::with(text, none).map_err(|error| error.to_string()).expect(text);
            assert_eq!(place.words(), words);
            // As a store takes it.
            let spec = place.store("store(host=1MiB)").expect("sound");
            assert!(spec.remote.is_some());
        }
        let place = Place::with("dir(path=\"x\",timeout=9)", none).expect("sound");
        let place = place.or("timeout", number(7.0)).or("fetchers", number(3.0));
        assert_eq!(place.words(), "dir(path=\"x\",timeout=9,fetchers=3)");
    }

    #[test]
    fn what_is_wrong_is_said_without_repeating_it() {
        for (text, word) in [
            ("", "dir:PATH"),
            ("localhost", "redis://HOST"),
            ("http://u:hunter2@a", "redis://HOST"),
            ("dir:", "path="),
            ("custom(x=1)", "redis"),
            ("dir(path=\"x\",timout=1)", "timeout"),
        ] {
            let error = Place::with(text, none).err().expect(text);
            assert!(error.message().contains(word), "{text}: {error}");
            assert!(!error.message().contains("hunter2"), "{error}");
        }
        for text in ["redis://u:hunter2@a", "redis://a:99999", "rediss://a", "redis://"] {
            let place =
                Place::with(text, |_| Some(b"hunter3".to_vec())).expect("its parameters are known");
            let error = place.open(&Clock::real()).err().expect(text);
            assert!(!error.to_string().contains("hunter"), "{error}");
        }
        let place = Place::with("redis://kv@127.0.0.1:1", none).expect("sound");
        let error = place.open(&Clock::real()).err().expect("a password is missing");
        assert!(error.message().contains("KVTIER_REMOTE_PASSWORD"), "{error}");
    }
}
