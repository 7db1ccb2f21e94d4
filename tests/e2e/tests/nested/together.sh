# The service VM gets the switches and a tenant the GPU, both at once.
service() {
  timeout 120 /lab/firstlight service-vm "$@"
  code=$?
  say "service-vm $*: $code"
}
drivers() {
  for function in /sys/bus/pci/devices/*; do
    case "$(cat $function/vendor)" in 0x10de | 0x11f8) ;; *) continue ;; esac
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
# Waits for words in a guest's console.
until_said() {
  for try in $(seq 150); do
    grep -q "$2" $1 && return
    sleep 0.4
  done
}
# Whether the agent of a guest takes a connection.
reach() {
  for try in $(seq 60); do
    socat -u OPEN:/dev/null VSOCK-CONNECT:$1:1024 2> /tmp/reach && say "agent of $1 reached" && return
    sleep 0.5
  done
  say "agent of $1 not reached: $(cat /tmp/reach)"
}

drivers before
# Nobody has bound anything, and libvirt is not asked to.
service define --image /lab/image --memory 512 --cpus 1 --huge-pages --unmanaged
service define --image /lab/image --memory 512 --cpus 1 --huge-pages

# Somebody has one of the switches.
guest thief 03 102
service start
virsh --quiet destroy thief

service start
service status --json
drivers running
guest tenant 08 101
# libvirt says it the other way round.
guest thief 03 102
console=/var/log/libvirt/qemu/firstlight-service-vm-console.log
until_said $console '"state":"ready"'
until_said /tmp/tenant.log '"state":"ready"'
reach 100
reach 101
virsh --quiet list | sed 's/^/list: /'
sed 's/^/service: /' $console
sed 's/^/tenant: /' /tmp/tenant.log

service destroy
drivers after
service status
service destroy
