#!/bin/sh
# Runs the README's two commands on fresh machines: in a clean chroot of each Debian release, with
# warnings as errors, LANG unset and a host name that does not resolve. Prints a row for each; the
# exit code is 1 when something failed. Needs root, debootstrap and a Debian mirror.
# Called by `make distros`; .ci/run calls it with BUILD_ONLY=1. Tests the commit at HEAD.
#
#   DISTROS="bookworm trixie sid"   the releases
#   DISTRO_USER=1                   each release a second time, as an ordinary user with sudo;
#                                   DISTRO_USER=only: as that user, not as root
#   DEMO_ARGS="steps=60"            arguments of the demo
#   TEST_ARGS="TEST_SECONDS=3000"   arguments of `make test`
#   BUILD_ONLY=1                    `make deps` and `make all` instead of the two commands
#   UNABLE=0                        exit code if no chroot can be made (default 1)
#   MIRROR=http://deb.debian.org/debian
#   DISTROS_DIR=/var/cache/engine-distros   base systems, logs, and the chroots of failed runs
set -u
export LC_ALL=C
tree=$(cd "$(dirname "$0")/.." && pwd) || exit 1
releases=${DISTROS:-bookworm trixie sid}
mirror=${MIRROR:-http://deb.debian.org/debian}
cache=${DISTROS_DIR:-/var/cache/engine-distros}

unable() { echo "distros: $1"; exit "${UNABLE:-1}"; }
[ "$(id -u)" = 0 ] || unable "making a chroot needs root; hint: sudo make distros"
command -v debootstrap >/dev/null ||
  unable "debootstrap is missing; hint: apt-get install debootstrap"
unshare --mount --uts --pid --fork true 2>/dev/null || unable "unshare cannot make namespaces here"
git -C "$tree" rev-parse -q --verify HEAD >/dev/null || unable "$tree is not a git clone"
mkdir -p "$cache" || unable "cannot make the folder $cache"

# A base system, made once and renamed into place when it is complete.
base() {
  [ -d "$cache/$1.base" ] && return 0
  rm -rf "$cache/$1.new"
  unshare --mount debootstrap --variant=minbase --include=make,git "$1" "$cache/$1.new" "$mirror" \
    >"$cache/$1.base.log" 2>&1 && mv "$cache/$1.new" "$cache/$1.base"
}

# Copies this machine's apt settings for the network: proxies, credentials, keys.
configure() {
  cp -L /etc/resolv.conf "$1/etc/resolv.conf" 2>/dev/null
  printf '127.0.0.1 localhost\n' >"$1/etc/hosts"
  mkdir -p "$1/etc/apt/apt.conf.d"
  for f in /etc/apt/apt.conf /etc/apt/apt.conf.d/*; do
    grep -qsE '^ *Acquire::(https?|ftp|Check|Retries|ForceIPv)' "$f" &&
      cp "$f" "$1/etc/apt/apt.conf.d/90host-$(basename "$f")"
  done
  for d in auth.conf.d keyrings; do
    [ -d "/etc/apt/$d" ] && cp -a "/etc/apt/$d" "$1/etc/apt/"
  done
}

# inside ROOT USER COMMAND: runs COMMAND in the chroot, in namespaces of its own, so that its mounts
# and processes end with it. The outer shell stays as PID 1 and reaps orphaned processes.
inside() {
  root=$1 user=$2 home=/root options=
  [ "$user" = root ] || { home=/home/$user options="--userspec=$user:$user"; }
  unshare --mount --uts --pid --fork --kill-child sh -c '
    root=$1 options=$2 user=$3 home=$4
    mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" || exit 125
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t sysfs -o ro sysfs "$root/sys" || mount --rbind /sys "$root/sys"
    hostname fresh-machine
    env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$home" \
      USER="$user" LOGNAME="$user" chroot $options "$root" sh -c "$5"
    exit $?' sh "$root" "$options" "$user" "$home" "$3" </dev/null
}

# fresh RELEASE USER: a clean copy of the base system with the tree in the user's home.
fresh() {
  root=$cache/$1.$2
  rm -rf "$root" && cp -a "$cache/$1.base" "$root" && configure "$root" || return 1
  if [ "$2" != root ]; then
    inside "$root" root "apt-get -qq update &&
      apt-get -qq -y install --no-install-recommends sudo &&
      useradd --create-home --shell /bin/sh $2 &&
      echo '$2 ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/$2" || return 1
  fi
  home=$([ "$2" = root ] && echo root || echo "home/$2")
  git clone -q --no-hardlinks "$tree" "$root/$home/engine" &&
    chown -R "$(stat -c %u:%g "$root/$home")" "$root/$home/engine"
}

VERSIONS='v() { dpkg-query -W -f "\${Version} " "$1" | sed "s/^[0-9]*://; s/[-+~][^ ]* / /"; }
echo "versions $(gcc -dumpfullversion) $(v libdnnl-dev) $(v libopenmpi-dev) $(dpkg-query -W \
  -f "\${Version}" luajit | grep -o "20[0-9]*" | head -n 1) $(v lua-busted)"'
ROW='%-9s %-5s %-8s %-7s %-9s %-9s %-7s %-7s %-7s %s\n'

failures=0
try() {
  log=$cache/$1.$2.log build=- demo=- test=-
  echo "distros: $1 as $2, log $log" >&2
  if ! fresh "$1" "$2" >"$log" 2>&1; then
    printf "$ROW" "$1" "$2" - - - - - - - "no chroot: $(tail -n 1 "$log")"
    failures=$((failures + 1))
    return
  fi
  go="cd ~/engine"
  if [ -n "${BUILD_ONLY:-}" ]; then
    if ! inside "$root" "$2" "$go && make deps" >>"$log" 2>&1 && [ "${UNABLE:-1}" = 0 ]; then
      echo "distros: no packages of $1 from its mirror: $(tail -n 1 "$log")"
      return
    fi
    inside "$root" "$2" "$go && make all PLUGIN= WERROR=1" >>"$log" 2>&1 && build=ok || build=FAILED
  else
    inside "$root" "$2" "$go && make demo WERROR=1 ${DEMO_ARGS:+DEMO_ARGS='$DEMO_ARGS'}" \
      >>"$log" 2>&1 && demo=ok || demo=FAILED
    inside "$root" "$2" "$go && make test WERROR=1 ${TEST_ARGS:-TEST_SECONDS=3600}" \
      >>"$log" 2>&1 && test=ok || test=FAILED
  fi
  inside "$root" root "$VERSIONS" >>"$log" 2>&1
  versions=$(sed -n 's/^versions //p' "$log" | tail -n 1)
  counts=$(sed 's/\x1b\[[0-9;]*m//g' "$log" |
    awk '/^[0-9]+ success/ {p += $1; f += $4 + $7; s += $10; n++}
         END {if (n) print p " passed, " f " failed, " s " pending"}')
  # shellcheck disable=SC2086
  printf "$ROW" "$1" "$2" ${versions:-- - - - -} "$demo" "$test" \
    "${counts:-${BUILD_ONLY:+build $build}}"
  case "$build$demo$test" in
    *FAILED*) failures=$((failures + 1)); grep -anE 'rror:|^Failure|^Error' "$log" | head -n 20 ;;
    *) rm -rf "$root" ;;
  esac
}

printf "$ROW" release user gcc oneDNN OpenMPI LuaJIT busted demo test result
for release in $releases; do
  if ! base "$release"; then
    echo "distros: no base system of $release from $mirror: $(tail -n 1 "$cache/$release.base.log")"
    [ "${UNABLE:-1}" = 0 ] || failures=$((failures + 1))
    continue
  fi
  [ "${DISTRO_USER:-}" = only ] || try "$release" root
  [ -n "${DISTRO_USER:-}" ] && try "$release" ada
done
[ "$failures" = 0 ]
