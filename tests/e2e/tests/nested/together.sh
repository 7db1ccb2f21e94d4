# The service VM gets the switches and a tenant the GPU, both at once.
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

# A guest that ends by itself: libvirt may say that it is off before it gives anything back.
service start
virsh --quiet qemu-monitor-command firstlight-service-vm --hmp quit 2> /dev/null
for try in $(seq 50); do
  virsh --quiet domstate firstlight-service-vm | grep -q 'shut off' && break
  sleep 0.1
done
service destroy
drivers afterwards
