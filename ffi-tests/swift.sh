#!/bin/bash
# Runs a command beside a real S3 service, OpenStack's Swift with its s3api:
#
#   ffi-tests/swift.sh WORKDIR COMMAND...
#
# Needs Debian's packages swift-proxy, swift-account, swift-container and swift-object; exits with 2
# where they are absent. The command gets KVTIER_S3: the URL, an empty bucket, a key and its secret.
# WORKDIR must be on a file system with extended attributes.
set -uo pipefail
work=${1:?usage: swift.sh WORKDIR COMMAND...}
shift
for kind in proxy account container object; do
    command -v "swift-$kind-server" >/dev/null || { echo "SKIP: swift-$kind-server is not installed"; exit 2; }
done
rm -rf "$work" && mkdir -p "$work/etc" "$work/node/d1" && work=$(cd "$work" && pwd) || exit 1
ports=$(/usr/bin/python3 -c '
import socket
all = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(one.getsockname()[1] for one in all))')
read -r proxy account container object <<<"$ports"
servers=()
end() { [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null; }
trap end EXIT

cd "$work/etc" || exit 1
export SWIFT_DIR=$work/etc
cat >swift.conf <<END
[swift-hash]
swift_hash_path_prefix = kvtier
swift_hash_path_suffix = kvtier
[storage-policy:0]
name = one
default = yes
END
common() {
    cat <<END
[DEFAULT]
swift_dir = $work/etc
bind_ip = 127.0.0.1
bind_port = $1
workers = 0
user = $(id -un)
END
}
storage() { # storage KIND PORT
    swift-ring-builder "$1.builder" create 4 1 1 && swift-ring-builder "$1.builder" add "r1z1-127.0.0.1:$2/d1" 1 &&
        swift-ring-builder "$1.builder" rebalance || return 1
    common "$2" >"$1.conf"
    cat >>"$1.conf" <<END
devices = $work/node
mount_check = false
[pipeline:main]
pipeline = $1-server
[app:$1-server]
use = egg:swift#$1
END
}
{ storage account "$account" && storage container "$container" && storage object "$object"; } >"$work/rings.log" || exit 1
common "$proxy" >proxy.conf
cat >>proxy.conf <<END
[pipeline:main]
pipeline = catch_errors cache s3api tempauth copy slo proxy-server
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
END
for kind in account container object proxy; do
    "swift-$kind-server" "$kind.conf" >"$work/$kind.log" 2>&1 &
    servers+=($!)
done
/usr/bin/python3 - "$proxy" <<'END' || { tail -n 5 "$work"/*.log; exit 1; }
# Creates the bucket, once the servers answer.
import datetime, hashlib, hmac, http.client, sys, time
host, key, secret = f"127.0.0.1:{sys.argv[1]}", "test:tester", "testing"
sha = lambda text: hashlib.sha256(text.encode()).hexdigest()
for attempt in range(600):
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    heads = {"host": host, "x-amz-content-sha256": sha(""), "x-amz-date": now}
    names = ";".join(heads)
    lines = "".join(f"{name}:{value}\n" for name, value in heads.items())
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n" + sha(f"PUT\n/kv-test\n\n{lines}\n{names}\n{sha('')}")
    sign = ("AWS4" + secret).encode()
    for part in [*scope.split("/"), text]:
        sign = hmac.new(sign, part.encode(), hashlib.sha256).digest()
    heads["Authorization"] = (f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, "
                              f"Signature={sign.hex()}")
    try:
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("PUT", "/kv-test", headers=heads)
        reply = connection.getresponse()
        text = reply.read()
        if reply.status in (200, 409):
            sys.exit(0)
    except OSError as error:
        text = error
    time.sleep(0.5)
sys.exit(f"Swift has no bucket: {text}")
END
cd "$OLDPWD" || exit 1
KVTIER_S3="http://127.0.0.1:$proxy kv-test test:tester testing" "$@"
