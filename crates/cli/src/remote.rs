//! The argument `--remote` of commands: `redis://HOST[:PORT]`, `dir:PATH`, or a remote of a
//! store's spec.

use std::ffi::OsString;
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

/// Environment variables of secrets: other users can see a command line. Keys of S3 are also read
/// from the variables of the S3 tools.
const ENVIRONMENT: [(&str, &[&str]); 5] = [
    ("password", &["KVTIER_REMOTE_PASSWORD"]),
    ("s3.key", &["KVTIER_REMOTE_S3_KEY", "AWS_ACCESS_KEY_ID"]),
    ("s3.secret", &["KVTIER_REMOTE_S3_SECRET", "AWS_SECRET_ACCESS_KEY"]),
    ("s3.token", &["KVTIER_REMOTE_S3_TOKEN", "AWS_SESSION_TOKEN"]),
    ("seal", &["KVTIER_REMOTE_SEAL"]),
];

/// A remote from the command line.
pub struct RemoteTarget {
    spec: Spec,
    secrets: Secrets,
}

/// An opened remote whose server has answered.
pub struct Opened {
    /// The remote.
    pub remote: Arc<dyn Remote>,
    /// The configuration that a store would use.
    pub config: RemoteConfig,
    /// The server's answer.
    pub server: Server,
}

impl RemoteTarget {
    /// Parses the argument and reads secrets from the environment. Errors do not repeat the
    /// argument: it may contain a password.
    pub fn read(text: &str) -> Result<RemoteTarget> {
        RemoteTarget::with(text, |name| std::env::var_os(name).map(OsStringExt::into_vec))
    }

    fn with(text: &str, environment: impl Fn(&str) -> Option<Vec<u8>>) -> Result<RemoteTarget> {
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
            // A session token is valid only with the key that it was issued with.
            let others = usize::from(name != "s3.token" || !has("KVTIER_REMOTE_S3_KEY"));
            let mut found = places.iter().take(1 + others).filter_map(|target| environment(target));
            if let Some(secret) = found.find(|secret| !secret.is_empty()) {
                secrets.add(name, &secret)?;
            }
        }
        let target = RemoteTarget { spec, secrets };
        // Reports errors in the spec before anything is opened.
        RemoteSpec::read(&target.spec)?;
        Ok(target)
    }

    /// Adds a parameter unless the spec has one of that name.
    pub fn or(mut self, key: &str, value: Value) -> RemoteTarget {
        if self.spec.args.iter().all(|arg| arg.key != key) {
            self.spec.args.push(arg(key, value));
        }
        self
    }

    /// The spec with a parameter set or replaced.
    fn with_param(&self, key: &str, value: Value) -> Spec {
        let mut spec = self.spec.clone();
        spec.args.retain(|arg| arg.key != key);
        spec.args.push(arg(key, value));
        spec
    }

    /// The spec, which contains no secrets.
    pub fn words(&self) -> String {
        self.spec.to_string()
    }

    /// The secrets that were found, each with the first variable that is read for it.
    pub fn variables(&self) -> Vec<(&'static str, OsString)> {
        let one = |(name, places): (&str, &'static [&'static str])| {
            let secret = self.secrets.get(name)?;
            Some((places[0], OsString::from_vec(secret.bytes().to_vec())))
        };
        ENVIRONMENT.into_iter().filter_map(one).collect()
    }

    /// The spec of a store with this remote. Opening the store fails if the remote does not answer.
    pub fn store(&self, text: &str) -> Result<StoreSpec> {
        let mut spec = Spec::parse(text)?;
        spec.args.push(arg("remote", Value::Spec(self.with_param("require", yes()))));
        let mut spec = StoreSpec::read(&spec)?;
        spec.secrets = self.secrets.clone();
        Ok(spec)
    }

    /// Opens the remote; fails if its server does not answer.
    pub fn open(&self, clock: &Clock) -> Result<Opened> {
        let Some(spec) = RemoteSpec::read(&self.with_param("require", yes()))? else {
            fail!(Spec, "the remote is 'none': name one");
        };
        let (remote, config, server) = spec.open(&self.secrets, None, clock).map_err(explain)?;
        Ok(Opened { remote, config, server: server.unwrap_or_default() })
    }
}

/// Adds the environment variables of secrets to an error about a missing or wrong one.
pub fn explain(error: Error) -> Error {
    let message = error.message();
    let expected = ["secret", "NOAUTH", "WRONGPASS", "denies"];
    if !expected.iter().any(|word| message.contains(word)) {
        return error;
    }
    let places: Vec<&str> = ENVIRONMENT.iter().map(|(_, places)| places[0]).collect();
    let places = places.join(", ");
    Error::new(error.status(), format!("{message} (this tool reads secrets from {places})"))
}

fn is_url(text: &str) -> bool {
    text.starts_with("redis://") || text.starts_with("rediss://")
}

/// A number as a parameter.
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
        let target = RemoteTarget::with(bucket, own).expect("sound");
        let bytes = |name: &str| target.secrets.get(name).map(|secret| secret.bytes().to_vec());
        assert_eq!(bytes("s3.key"), Some(b"KVTIER_REMOTE_S3_KEY".to_vec()));
        assert_eq!(bytes("s3.secret"), Some(b"AWS_SECRET_ACCESS_KEY".to_vec()));
        assert_eq!((bytes("s3.token"), bytes("seal"), bytes("password")), (None, None, None));
        let token = |name: &str| (name == "AWS_SESSION_TOKEN").then(|| b"of another".to_vec());
        let target =
            RemoteTarget::with(bucket, |name| own(name).or_else(|| token(name))).expect("sound");
        assert!(target.secrets.get("s3.token").is_none(), "it belongs to another key");
        let target = RemoteTarget::with(bucket, token).expect("sound");
        assert!(target.secrets.get("s3.token").is_some());
        // Other remotes get no secrets of S3, and an empty variable is no secret.
        let target = RemoteTarget::with("redis://a", own).expect("sound");
        assert!(target.secrets.get("s3.key").is_none());
        let target = RemoteTarget::with(bucket, |_| Some(Vec::new())).expect("sound");
        assert!(target.secrets.get("s3.key").is_none());
    }

    #[test]
    fn a_remote_is_a_url_a_path_or_a_spec() {
        for (text, words) in [
            ("redis://a:7000", "redis(url=\"redis://a:7000\")"),
            ("dir:/mnt/k\"v", "dir(path=\"/mnt/k\\\"v\")"),
            ("dir(path=\"x\",timeout=9)", "dir(path=\"x\",timeout=9)"),
        ] {
            let target =
                RemoteTarget::with(text, none).map_err(|error| error.to_string()).expect(text);
            assert_eq!(target.words(), words);
            // In the spec of a store.
            let spec = target.store("store(host=1MiB)").expect("sound");
            assert!(spec.remote.is_some());
        }
        let target = RemoteTarget::with("dir(path=\"x\",timeout=9)", none).expect("sound");
        let target = target.or("timeout", number(7.0)).or("fetchers", number(3.0));
        assert_eq!(target.words(), "dir(path=\"x\",timeout=9,fetchers=3)");
    }

    #[test]
    fn errors_do_not_repeat_the_argument() {
        for (text, word) in [
            ("", "dir:PATH"),
            ("localhost", "redis://HOST"),
            ("http://u:hunter2@a", "redis://HOST"),
            ("dir:", "path="),
            ("custom(x=1)", "redis"),
            ("dir(path=\"x\",timout=1)", "timeout"),
        ] {
            let error = RemoteTarget::with(text, none).err().expect(text);
            assert!(error.message().contains(word), "{text}: {error}");
            assert!(!error.message().contains("hunter2"), "{error}");
        }
        for text in ["redis://u:hunter2@a", "redis://a:99999", "rediss://a", "redis://"] {
            let target = RemoteTarget::with(text, |_| Some(b"hunter3".to_vec()))
                .expect("its parameters are known");
            let error = target.open(&Clock::real()).err().expect(text);
            assert!(!error.to_string().contains("hunter"), "{error}");
        }
        let target = RemoteTarget::with("redis://kv@127.0.0.1:1", none).expect("sound");
        let error = target.open(&Clock::real()).err().expect("a password is missing");
        assert!(error.message().contains("KVTIER_REMOTE_PASSWORD"), "{error}");
    }
}
