# The service VM gets the bridge; another ConnectX-7 stays with the host.
drivers before
service define --image /lab/image --memory 512 --cpus 1 --huge-pages
service start
service status
drivers running
console=/var/log/libvirt/qemu/firstlight-service-vm-console.log
until_said $console '"mode":'
sed 's/^/service: /' $console
service destroy
drivers after
