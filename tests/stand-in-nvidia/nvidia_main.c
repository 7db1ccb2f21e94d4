// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in nvidia.ko: module, parameters, PCI probe.
 *
 * Probe is quick and synchronous and starts nothing: the cost of a GPU is its
 * first open, see nvidia_open.c.
 */
#include <linux/delay.h>
#include <linux/module.h>
#include <linux/moduleparam.h>

#include "standin.h"

#define PCI_DEVICE_H100 0x2330
#define PCI_DEVICE_H200 0x2335
#define PCI_DEVICE_B200 0x2901

LIST_HEAD(gpu_list);
DEFINE_MUTEX(gpu_list_lock);

/* Parameters of the real module that someone may set; most do nothing. */
int NVreg_EnableNonblockingOpen = 1;
module_param(NVreg_EnableNonblockingOpen, int, 0444);
MODULE_PARM_DESC(NVreg_EnableNonblockingOpen, "0: O_NONBLOCK is ignored by open");
int NVreg_ModifyDeviceFiles = 1;
module_param(NVreg_ModifyDeviceFiles, int, 0444);
int NVreg_DeviceFileUID;
module_param(NVreg_DeviceFileUID, int, 0444);
int NVreg_DeviceFileGID;
module_param(NVreg_DeviceFileGID, int, 0444);
int NVreg_DeviceFileMode = 0666;
module_param(NVreg_DeviceFileMode, int, 0444);
int NVreg_NvLinkDisable;
module_param(NVreg_NvLinkDisable, int, 0444);
int NVreg_EnableGpuFirmware = 18;
module_param(NVreg_EnableGpuFirmware, int, 0444);
int NVreg_OpenRmEnableUnsupportedGpus = 1;
module_param(NVreg_OpenRmEnableUnsupportedGpus, int, 0444);
char *NVreg_RegistryDwords;
module_param(NVreg_RegistryDwords, charp, 0444);

/*
 * Parameters of the stand-in. An array with one value is for every GPU, one
 * with several is by minor; GPUs beyond its end follow their registers, and so
 * does a GPU whose value is -1.
 */
static int standin_attach_ms[NV_MAX_GPUS];
static int standin_attach_ms_count;
module_param_array(standin_attach_ms, int, &standin_attach_ms_count, 0644);
MODULE_PARM_DESC(standin_attach_ms, "Milliseconds of an attach, per GPU or for all (-1: LAB_ATTACH_MS)");
static int standin_fail[NV_MAX_GPUS];
static int standin_fail_count;
module_param_array(standin_fail, int, &standin_fail_count, 0644);
MODULE_PARM_DESC(standin_fail, "Failure code, 0 for none, per GPU or for all (-1: LAB_FAIL_CODE)");
static int standin_hang[NV_MAX_GPUS];
static int standin_hang_count;
module_param_array(standin_hang, int, &standin_hang_count, 0644);
MODULE_PARM_DESC(standin_hang, "1: the attach never ends, per GPU or for all (-1: LAB_HANG)");
char *standin_firmware;
module_param(standin_firmware, charp, 0444);
MODULE_PARM_DESC(standin_firmware, "A firmware file that every attach loads first");
static int standin_init_ms;
module_param(standin_init_ms, int, 0444);
MODULE_PARM_DESC(standin_init_ms, "Milliseconds that the module's own start takes");
static int standin_signs[NV_MAX_GPUS];
static int standin_signs_count;
module_param_array(standin_signs, int, &standin_signs_count, 0644);
MODULE_PARM_DESC(standin_signs, "1: the GPU interrupts ten times a second during its attach, per GPU or for all");
bool standin_hang_holds_lock;
module_param(standin_hang_holds_lock, bool, 0644);
MODULE_PARM_DESC(standin_hang_holds_lock, "A hanging attach holds the global lock");
int standin_lock_permille = 50;
module_param(standin_lock_permille, int, 0644);
MODULE_PARM_DESC(standin_lock_permille, "Part of an attach under the global lock (50; 1000: one GPU after the other)");

/* For nvidia-uvm, so that its dependency shows as the real one's does. */
const char *nvidia_standin_release(void);
const char *nvidia_standin_release(void)
{
	return STANDIN_RELEASE;
}
EXPORT_SYMBOL_GPL(nvidia_standin_release);

static u32 parameter_or_register(struct gpu *gpu, const int *values, int count, u32 reg)
{
	int value = -1;

	if (count == 1)
		value = values[0];
	else if (gpu->minor < count)
		value = values[gpu->minor];
	return value == -1 ? lab_read(gpu, reg) : (u32)value;
}

u32 standin_attach_ms_of(struct gpu *gpu)
{
	return parameter_or_register(gpu, standin_attach_ms, standin_attach_ms_count, LAB_ATTACH_MS);
}

u32 standin_fail_of(struct gpu *gpu)
{
	return parameter_or_register(gpu, standin_fail, standin_fail_count, LAB_FAIL_CODE);
}

bool standin_signs_of(struct gpu *gpu)
{
	return gpu->minor < standin_signs_count && standin_signs[gpu->minor];
}

bool standin_hang_of(struct gpu *gpu)
{
	return parameter_or_register(gpu, standin_hang, standin_hang_count, LAB_HANG) != 0;
}

/* Spreads the few bits that differ over all 64. */
static u64 mix(u64 value)
{
	value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
	value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
	return value ^ (value >> 31);
}

/* Version 4 in form, but always the same for the same serial number. */
static void make_uuid(struct gpu *gpu)
{
	u64 serial = pci_get_dsn(gpu->pdev);
	u64 high, low;

	if (!serial)
		serial = ((u64)pci_domain_nr(gpu->pdev->bus) << 16) | pci_dev_id(gpu->pdev);
	high = mix(serial);
	low = mix(high);
	snprintf(gpu->uuid, sizeof(gpu->uuid), "GPU-%08x-%04x-4%03x-%04x-%012llx",
		 (u32)(high >> 32), (u32)(high >> 16) & 0xffff, (u32)high & 0xfff,
		 0x8000 | ((u32)(low >> 48) & 0x3fff), low & 0xffffffffffffULL);
}

static int nvidia_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct gpu *gpu, *other;
	int rc;

	if (pdev->class >> 8 != PCI_CLASS_DISPLAY_3D)
		return -ENODEV;
	gpu = devm_kzalloc(&pdev->dev, sizeof(*gpu), GFP_KERNEL);
	if (!gpu)
		return -ENOMEM;
	gpu->pdev = pdev;
	gpu->model = (const char *)id->driver_data;
	mutex_init(&gpu->lock);
	init_waitqueue_head(&gpu->gone_wait);

	rc = pcim_enable_device(pdev);
	if (rc)
		return rc;
	pci_set_master(pdev);
	gpu->bar0 = pcim_iomap(pdev, 0, 0);
	if (!gpu->bar0 || pci_resource_len(pdev, 0) < LAB_BASE + 0x20) {
		dev_err(&pdev->dev, "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid\n");
		return -ENODEV;
	}
	if (lab_read(gpu, LAB_MAGIC) != LAB_MAGIC_VALUE) {
		dev_err(&pdev->dev, "not a synthetic device; the stand-in leaves it alone\n");
		return -ENODEV;
	}
	make_uuid(gpu);
	/* What the real probe takes. */
	usleep_range(2000, 2500);

	gpu->open_queue = kthread_create_worker(0, "nv_open_q");
	if (IS_ERR(gpu->open_queue))
		return PTR_ERR(gpu->open_queue);

	/* Probe order is the order of minors; the lowest free one is taken. */
	mutex_lock(&gpu_list_lock);
	list_for_each_entry(other, &gpu_list, node) {
		if (other->minor != gpu->minor)
			break;
		gpu->minor++;
	}
	if (gpu->minor >= NV_MAX_GPUS) {
		mutex_unlock(&gpu_list_lock);
		rc = -ENOSPC;
		goto stop;
	}
	list_add_tail(&gpu->node, &other->node);
	mutex_unlock(&gpu_list_lock);

	rc = nvidia_proc_add(gpu);
	if (rc) {
		gpu_wait_unused(gpu);
		goto stop;
	}
	pci_set_drvdata(pdev, gpu);
	return 0;
stop:
	kthread_destroy_worker(gpu->open_queue);
	return rc;
}

static void nvidia_remove(struct pci_dev *pdev)
{
	struct gpu *gpu = pci_get_drvdata(pdev);

	nvidia_proc_remove(gpu);
	/* From here no open finds it; what is open must be closed first. */
	gpu_wait_unused(gpu);
	kthread_destroy_worker(gpu->open_queue);
}

#define GPU_ID(device, name) \
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, device), .driver_data = (kernel_ulong_t)(name) }

static const struct pci_device_id nvidia_ids[] = {
	GPU_ID(PCI_DEVICE_H100, "NVIDIA H100 80GB HBM3"),
	GPU_ID(PCI_DEVICE_H200, "NVIDIA H200"),
	GPU_ID(PCI_DEVICE_B200, "NVIDIA B200"),
	{ }
};
MODULE_DEVICE_TABLE(pci, nvidia_ids);

static struct pci_driver nvidia_pci_driver = {
	.name = "nvidia",
	.id_table = nvidia_ids,
	.probe = nvidia_probe,
	.remove = nvidia_remove,
	.driver.probe_type = PROBE_FORCE_SYNCHRONOUS,
};

static int __init nvidia_init(void)
{
	int rc;

	if (standin_init_ms > 0)
		msleep(standin_init_ms);
	rc = nvidia_proc_init();
	if (rc)
		return rc;
	rc = nvidia_chrdev_init();
	if (rc)
		goto proc;
	rc = nvidia_fabric_init();
	if (rc)
		goto chrdev;
	rc = pci_register_driver(&nvidia_pci_driver);
	if (rc)
		goto fabric;
	if (list_empty(&gpu_list) && !nvidia_fabric_present()) {
		pr_err("NVRM: No NVIDIA GPU found.\n");
		rc = -ENODEV;
		goto driver;
	}
	pr_info("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  " STANDIN_RELEASE " (stand-in)\n");
	return 0;
driver:
	pci_unregister_driver(&nvidia_pci_driver);
fabric:
	nvidia_fabric_exit();
chrdev:
	nvidia_chrdev_exit();
proc:
	nvidia_proc_exit();
	return rc;
}

static void __exit nvidia_exit(void)
{
	pci_unregister_driver(&nvidia_pci_driver);
	nvidia_fabric_exit();
	nvidia_chrdev_exit();
	nvidia_proc_exit();
}

module_init(nvidia_init);
module_exit(nvidia_exit);

MODULE_LICENSE("GPL");
MODULE_VERSION(STANDIN_RELEASE);
MODULE_DESCRIPTION("stand-in for the NVIDIA driver: attach timing and /proc files for tests, no hardware");
MODULE_ALIAS("char-major-195-*");
