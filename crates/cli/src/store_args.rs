//! Options that describe a store.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use kvtier::base::spec::{Arg, MAX_SPEC_BYTES, Spec, Value};

use crate::remote::{RemoteTarget, number};
use crate::spec;
use crate::stream::sizes::bytes;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The store of `kvtier run` and `kvtier serve`.
#[derive(clap::Args)]
pub struct StoreArgs {
    /// Directory for KV, which is made if it is missing; without it KV ends with the program
    #[arg(long, value_name = "DIR")]
    pub disk: Option<PathBuf>,
    /// Limit of that directory
    #[arg(long, default_value = "8GiB", value_parser = bytes, value_name = "SIZE", requires = "disk")]
    disk_size: u64,
    /// Host memory for KV
    #[arg(long, default_value = "1GiB", value_parser = bytes, value_name = "SIZE")]
    host: u64,
    /// Eviction policy of host memory, such as `s3fifo`; default: the library's
    #[arg(long, value_name = "SPEC")]
    policy: Option<String>,
    /// KV on a server, shared by machines: redis://HOST[:PORT], dir:PATH, or a remote of a store's
    /// spec; secrets are read from KVTIER_REMOTE_PASSWORD and others
    #[arg(long)]
    remote: Option<String>,
    /// Spec of the whole store instead, such as `store(host=8GiB, disk=disk(path="kv"))`
    #[arg(long, value_name = "SPEC", conflicts_with_all = ["disk", "disk_size", "host", "policy", "remote"])]
    store: Option<String>,
}

impl StoreArgs {
    /// The remote, with its secrets from the environment.
    pub fn remote(&self) -> Outcome<Option<RemoteTarget>> {
        Ok(self.remote.as_deref().map(RemoteTarget::read).transpose()?)
    }

    /// Whether the whole spec was given.
    pub fn is_whole(&self) -> bool {
        self.store.is_some()
    }

    /// The spec, checked, with further parameters.
    pub fn spec<'a>(
        &self,
        remote: Option<&RemoteTarget>,
        more: impl IntoIterator<Item = (&'a str, Value)>,
    ) -> Outcome<String> {
        let mut spec = match &self.store {
            Some(text) => Spec::parse(text).map_err(|error| format!("--store: {error}"))?,
            None => self.of_options(remote)?,
        };
        for (key, value) in more {
            // What --store says itself holds.
            if spec.args.iter().all(|arg| arg.key != key) {
                spec.args.push(arg(key, value));
            }
        }
        let spec = spec.to_string();
        spec::check(&spec).map_err(|error| format!("the store's spec {spec}: {error}"))?;
        if spec.len() > MAX_SPEC_BYTES {
            return Err("the store's spec is too long".into());
        }
        Ok(spec)
    }

    fn of_options(&self, remote: Option<&RemoteTarget>) -> Outcome<Spec> {
        let mut all = vec![arg("host", number(self.host as f64))];
        if let Some(disk) = &self.disk {
            // The name is that of `kvtier-llama --disk`, which shares the KV.
            let path = std::path::absolute(disk)?.join("kv");
            fs::DirBuilder::new().recursive(true).mode(0o700).create(disk).map_err(|error| {
                format!("the directory {} cannot be made: {error}", disk.display())
            })?;
            let path = path.to_str().ok_or("the path of --disk is not UTF-8")?.to_string();
            let args =
                vec![arg("path", Value::Text(path)), arg("bytes", number(self.disk_size as f64))];
            let disk = Spec { name: "disk".to_string(), args, offset: 0 };
            all.push(arg("disk", Value::Spec(disk)));
        }
        if let Some(policy) = &self.policy {
            all.push(arg("policy", Value::Spec(Spec::parse(policy)?)));
        }
        if let Some(remote) = remote {
            let remote = Spec::parse(&remote.words())?;
            all.push(arg("remote", Value::Spec(remote)));
        }
        Ok(Spec { name: "store".to_string(), args: all, offset: 0 })
    }
}

fn arg(key: &str, value: Value) -> Arg {
    Arg { key: key.to_string(), value, offset: 0 }
}
