//! From what is said of a remote to the remote, as far as it is built in.

use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::store::remote_spec::{Kind, RemoteSpec, Secrets};
use crate::store::spec::CustomRemote;
#[cfg(feature = "redis")]
use crate::tier::remote::redis::Redis;
use crate::tier::remote::{Publish, Remote};

/// The remote of a spec. UNSUPPORTED = it is not built in.
pub(super) fn open(
    spec: &RemoteSpec,
    secrets: &Secrets,
    custom: Option<&CustomRemote>,
    clock: &Clock,
) -> Result<Arc<dyn Remote>> {
    let remote = match &spec.kind {
        Kind::Redis { .. } => redis(spec, secrets, clock)?,
        Kind::S3 { .. } => s3(spec, secrets, clock)?,
        Kind::Dir { .. } => dir(spec, clock)?,
        Kind::Custom => match custom {
            Some(custom) => (custom.0)(&spec.prefix),
            None => fail!(Invalid, "remote=custom(...) needs the remote itself, in the options"),
        },
    };
    match secrets.get("seal") {
        Some(secret) => seal(remote, &secret),
        None => Ok(Arc::from(remote)),
    }
}

/// Nobody asked for it when this was built.
#[allow(dead_code, reason = "a library may have all of them")]
fn missing<T>(feature: &str) -> Result<T> {
    crate::tier::remote::need(feature)?;
    fail!(Unsupported, "built without {feature}")
}

/// What tells a remote of events. UNSUPPORTED = it is not built in.
#[cfg(feature = "redis")]
pub(super) fn publisher(spec: &RemoteSpec, secrets: &Secrets, clock: &Clock) -> Result<Publish> {
    let Kind::Redis { events_kept, .. } = &spec.kind else { fail!(Invalid, "not a Redis server") };
    Ok(open_redis(spec, secrets, clock)?.publisher(*events_kept))
}

#[cfg(not(feature = "redis"))]
pub(super) fn publisher(_: &RemoteSpec, _: &Secrets, _: &Clock) -> Result<Publish> {
    missing("redis")
}

#[cfg(feature = "redis")]
fn open_redis(spec: &RemoteSpec, secrets: &Secrets, clock: &Clock) -> Result<Redis> {
    use crate::tier::remote::redis::RedisOpts;

    let Kind::Redis { url, user, cluster, replicas, ttl_s, wait, .. } = &spec.kind else {
        fail!(Invalid, "not a Redis server");
    };
    let opts = RedisOpts {
        user: user.clone(),
        password: secrets.get("password"),
        cluster: *cluster,
        replicas: *replicas,
        ttl_s: *ttl_s,
        wait: *wait,
        connect_ns: spec.connect_ns,
        tls: spec.tls.clone(),
        ..RedisOpts::new(url, spec.prefix.clone())
    };
    Redis::open(&opts, clock.clone())
}

#[cfg(feature = "redis")]
fn redis(spec: &RemoteSpec, secrets: &Secrets, clock: &Clock) -> Result<Box<dyn Remote>> {
    Ok(Box::new(open_redis(spec, secrets, clock)?))
}

#[cfg(not(feature = "redis"))]
fn redis(_: &RemoteSpec, _: &Secrets, _: &Clock) -> Result<Box<dyn Remote>> {
    missing("redis")
}

#[cfg(feature = "s3")]
fn s3(spec: &RemoteSpec, secrets: &Secrets, clock: &Clock) -> Result<Box<dyn Remote>> {
    use crate::tier::remote::s3::{S3, S3Opts, Style};

    let Kind::S3 { url, bucket, region, is_virtual, connections } = &spec.kind else {
        fail!(Invalid, "not a bucket");
    };
    let opts = S3Opts {
        url: url.clone(),
        bucket: bucket.clone(),
        region: region.clone(),
        style: if *is_virtual { Style::Virtual } else { Style::Path },
        prefix: spec.prefix.clone(),
        key: secrets.get("s3.key"),
        secret: secrets.get("s3.secret"),
        token: secrets.get("s3.token"),
        connect_ns: spec.connect_ns,
        connections: *connections,
        tls: spec.tls.clone(),
    };
    Ok(Box::new(S3::open(&opts, clock.clone())?))
}

#[cfg(not(feature = "s3"))]
fn s3(_: &RemoteSpec, _: &Secrets, _: &Clock) -> Result<Box<dyn Remote>> {
    missing("s3")
}

#[cfg(feature = "dir")]
fn dir(spec: &RemoteSpec, clock: &Clock) -> Result<Box<dyn Remote>> {
    use crate::tier::remote::dir::{Dir, DirOpts};

    let Kind::Dir { path, fsync } = &spec.kind else { fail!(Invalid, "not a directory") };
    let (path, prefix, clock) = (path.clone(), spec.prefix.clone(), clock.clone());
    Ok(Box::new(Dir::new(DirOpts { path, prefix, fsync: *fsync, clock })))
}

#[cfg(not(feature = "dir"))]
fn dir(_: &RemoteSpec, _: &Clock) -> Result<Box<dyn Remote>> {
    missing("dir")
}

#[cfg(feature = "seal")]
fn seal(
    remote: Box<dyn Remote>,
    secret: &crate::tier::remote::secret::Secret,
) -> Result<Arc<dyn Remote>> {
    Ok(Arc::new(crate::tier::remote::seal::Sealed::new(remote, secret)?))
}

#[cfg(not(feature = "seal"))]
fn seal(_: Box<dyn Remote>, _: &crate::tier::remote::secret::Secret) -> Result<Arc<dyn Remote>> {
    missing("seal")
}
