# Process 1 of the host: what a host's own system does before anybody logs in.
# It waits for every child, and so reaps what others have left.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin LC_ALL=C
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
rm -rf /var/run; ln -s /run /var/run
mkdir -p /sys/fs/cgroup /dev/hugepages /dev/pts /dev/shm /run/libvirt /var/lib/firstlight /var/log/libvirt/qemu /var/lib/libvirt
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t hugetlbfs hugetlbfs /dev/hugepages
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
echo gpu-host > /proc/sys/kernel/hostname
printf 'root:x:0:0:root:/root:/bin/bash\nlibvirt-qemu:x:64055:104::/var/lib/libvirt:/bin/false\nnobody:x:65534:65534:nobody:/:/bin/false\n' > /etc/passwd
printf 'root:x:0:\nkvm:x:104:\nlibvirt:x:105:\nlibvirt-qemu:x:64055:\ntty:x:5:\nnogroup:x:65534:\n' > /etc/group
printf '127.0.0.1 localhost gpu-host\n' > /etc/hosts
ldconfig
# A package's scripts would have made these.
for name in iptables ip6tables ebtables; do [ -e /usr/sbin/$name ] || ln -s $name-nft /usr/sbin/$name; done
mkdir -p /etc/libvirt
cat > /etc/libvirt/qemu.conf <<'CONF'
stdio_handler = "file"
security_driver = "none"
user = "root"
group = "root"
namespaces = []
CONF
printf 'auth_unix_rw = "none"\nauth_unix_ro = "none"\n' > /etc/libvirt/libvirtd.conf
say() { echo "host: $(cut -d' ' -f1 /proc/uptime) $*"; }
say "up"
libvirtd > /tmp/libvirtd.log 2>&1 &
for try in $(seq 60); do virsh version > /tmp/version 2>&1 && break; sleep 0.5; done
if grep -q 'hypervisor: QEMU' /tmp/version; then
  say "libvirt answers"
  . /lab/scenario.sh
else
  say "no libvirt: $(cat /tmp/version)"
fi
say "libvirtd's log:"; tail -n 12 /tmp/libvirtd.log
for log in /var/log/libvirt/qemu/*.log; do say "$log"; tail -n 4 "$log" | cut -c1-300; done
echo "host: the end"
echo o > /proc/sysrq-trigger
sleep 60
