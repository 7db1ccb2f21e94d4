# Process 1 of the host: the setup that a real host's boot would have done.
# It waits for every child, so it also reaps orphans.
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
# Created by maintainer scripts of the packages on a real host.
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
service() {
  timeout 120 /lab/firstlight service-vm "$@"
  code=$?
  say "service-vm $*: $code"
}
drivers() {
  for function in /sys/bus/pci/devices/*; do
    case "$(cat $function/vendor)" in 0x10de | 0x11f8 | 0x15b3) ;; *) continue ;; esac
    driver=none
    [ -e $function/driver ] && driver=$(basename "$(readlink $function/driver)")
    echo "$1 $(basename $function) $(cat $function/device) group $(basename "$(readlink $function/iommu_group)") driver $driver"
  done
}
# A guest with one function: its name, the function's bus, its vsock context id.
guest() {
  cat > /tmp/$1.xml <<XML
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>$1</name> <memory unit='MiB'>512</memory> <memoryBacking><hugepages/></memoryBacking> <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type><kernel>/lab/image/vmlinux</kernel>
    <initrd>/lab/image/initrd.cpio</initrd><cmdline>console=hvc0 quiet panic=-1</cmdline></os>
  <features><acpi/></features> <cpu mode='host-passthrough' check='none' migratable='off'/>
  <on_poweroff>destroy</on_poweroff> <on_reboot>destroy</on_reboot> <on_crash>destroy</on_crash>
  <devices>
    <controller type='usb' model='none'/>
    <console type='file'><source path='/tmp/$1.log'/><target type='virtio' port='0'/></console>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source><address domain='0x0000' bus='0x$2' slot='0x00' function='0x0'/></source></hostdev>
    <vsock model='virtio'><cid auto='no' address='$3'/></vsock>
    <memballoon model='none'/>
  </devices>
  <!-- The emulated IOMMU would take each page of large memory by itself. -->
  <qemu:override><qemu:device alias='hostdev0'><qemu:frontend>
    <qemu:property name='x-no-mmap' type='bool' value='true'/>
  </qemu:frontend></qemu:device></qemu:override>
</domain>
XML
  virsh --quiet create /tmp/$1.xml 2>&1 | sed "s/^/$1 says: /"
}
# Waits for a text on a guest's console.
until_said() {
  for try in $(seq 150); do
    grep -q "$2" $1 && return
    sleep 0.4
  done
}
# Whether the agent of a guest accepts a connection.
reach() {
  for try in $(seq 60); do
    socat -u OPEN:/dev/null VSOCK-CONNECT:$1:1024 2> /tmp/reach && say "agent of $1 reached" && return
    sleep 0.5
  done
  say "agent of $1 not reached: $(cat /tmp/reach)"
}

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
