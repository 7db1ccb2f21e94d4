# The service VM gets the switches and a tenant the GPU, both at once.
# The partition daemon, asked through vsock.
fabric() {
  timeout 60 /lab/fmctl --connect vsock:100 "$@" > /tmp/fabric 2>&1
  code=$?
  sed 's/^/fabric: /' /tmp/fabric
  say "fmctl $*: $code"
}
until_fabric() {
  for try in $(seq 150); do
    timeout 20 /lab/fmctl --connect vsock:100 --json health 2> /dev/null | grep -q '"fabric_manager": true' && return
    sleep 0.4
  done
}

drivers before
# The functions are not bound, and libvirt does not bind them.
service define --image /lab/image --memory 512 --cpus 1 --huge-pages --unmanaged
service define --image /lab/service --memory 512 --cpus 1 --huge-pages --baseboard-serial 1650123456789

# Another VM has one of the switches.
guest thief 03 102
service start
virsh --quiet destroy thief

service start
service status --json
drivers running
console=/var/log/libvirt/qemu/firstlight-service-vm-console.log
# A tenant: its GPU's partition, then its VM.
until_fabric
fabric list
fabric activate 7 --owner tenant --guest-driver 550.163.01
guest tenant 08 101
# libvirt refuses the reverse case.
guest thief 03 102
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

# The tenant still runs, without the fabric.
fabric list
service start
until_fabric
fabric health
# A map of another board than the one passed by the host.
(echo '[baseboard_modules]'; for id in $(seq 8); do echo "$id = \"0000:0$id:00.0\""; done) > /tmp/table.toml
fabric inventory set /tmp/table.toml --baseboard-serial 1650999999999
virsh --quiet destroy tenant
fabric reconcile --yes

# A guest that ends by itself: libvirt may report it as off before it releases its functions.
virsh --quiet qemu-monitor-command firstlight-service-vm --hmp quit 2> /dev/null
for try in $(seq 50); do
  virsh --quiet domstate firstlight-service-vm | grep -q 'shut off' && break
  sleep 0.1
done
service destroy
drivers afterwards
