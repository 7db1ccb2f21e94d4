// SPDX-License-Identifier: GPL-2.0
/*
 * The NVSwitch side of nvidia.ko: a second PCI driver without GPU minors, and
 * the dynamic majors that a service VM makes nodes from. All of the nodes open
 * and none does anything.
 */
#include <linux/atomic.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/seq_file.h>

#include "standin.h"

#define PCI_DEVICE_LS10 0x22a3
#define SWITCH_MINORS   256

static atomic_t switches = ATOMIC_INIT(0);
static struct proc_dir_entry *switch_root, *switch_devices, *nvlink_root;

static const struct file_operations inert_fops = {
	.owner = THIS_MODULE,
	.open = nonseekable_open,
};

static struct {
	const char *name;
	unsigned int minors;
	dev_t first;
	struct cdev cdev;
} majors[] = {
	{ .name = "nvidia-caps", .minors = 256 },
	{ .name = "nvidia-nvlink", .minors = 1 },
	{ .name = "nvidia-nvswitch", .minors = SWITCH_MINORS },
};

/*
 * What a test writes to the parameter is said as the driver says it of the
 * first switch: "20034, Fatal, Link 30 LTSSM Fault Up".
 */
static int sxid_set(const char *text, const struct kernel_param *unused)
{
	struct pci_dev *pdev = pci_get_device(PCI_VENDOR_ID_NVIDIA, PCI_DEVICE_LS10, NULL);

	if (!pdev)
		return -ENODEV;
	pr_err("nvidia-nvswitch0: SXid (PCI:%s): %.*s\n", pci_name(pdev), (int)strcspn(text, "\n"), text);
	pci_dev_put(pdev);
	return 0;
}

static const struct kernel_param_ops sxid_ops = { .set = sxid_set };
module_param_cb(standin_sxid, &sxid_ops, NULL, 0200);

static int switch_information_show(struct seq_file *s, void *unused)
{
	seq_puts(s, "Driver Version: " STANDIN_RELEASE "\n");
	return 0;
}

static int fabric_mgmt_show(struct seq_file *s, void *unused)
{
	seq_puts(s, "DeviceFileMinor: 0\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
	return 0;
}

static int switch_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct proc_dir_entry *entry;
	void __iomem *bar0;
	int rc;

	rc = pcim_enable_device(pdev);
	if (rc)
		return rc;
	bar0 = pcim_iomap(pdev, 0, 0);
	if (!bar0 || pci_resource_len(pdev, 0) < LAB_BASE + 0x20)
		return -ENODEV;
	if (readl(bar0 + LAB_BASE + LAB_MAGIC) != LAB_MAGIC_VALUE) {
		dev_err(&pdev->dev, "not a synthetic device; the stand-in leaves it alone\n");
		return -ENODEV;
	}
	entry = proc_mkdir(pci_name(pdev), switch_devices);
	if (!entry || !proc_create_single("information", 0444, entry, switch_information_show)) {
		proc_remove(entry);
		return -ENOMEM;
	}
	pci_set_drvdata(pdev, entry);
	atomic_inc(&switches);
	pr_info("nvidia-nvswitch: Probing device %s, Vendor Id = 0x%x, Device Id = 0x%x, Class = 0x%x\n",
		pci_name(pdev), pdev->vendor, pdev->device, pdev->class);
	return 0;
}

static void switch_remove(struct pci_dev *pdev)
{
	proc_remove(pci_get_drvdata(pdev));
	atomic_dec(&switches);
}

static const struct pci_device_id switch_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_DEVICE_LS10) },
	{ }
};
MODULE_DEVICE_TABLE(pci, switch_ids);

static struct pci_driver switch_driver = {
	.name = "nvidia-nvswitch",
	.id_table = switch_ids,
	.probe = switch_probe,
	.remove = switch_remove,
	.driver.probe_type = PROBE_FORCE_SYNCHRONOUS,
};

bool nvidia_fabric_present(void)
{
	return atomic_read(&switches) > 0;
}

static void majors_exit(int count)
{
	while (count-- > 0) {
		cdev_del(&majors[count].cdev);
		unregister_chrdev_region(majors[count].first, majors[count].minors);
	}
}

static int majors_init(void)
{
	int i, rc;

	for (i = 0; i < ARRAY_SIZE(majors); i++) {
		rc = alloc_chrdev_region(&majors[i].first, 0, majors[i].minors, majors[i].name);
		if (rc)
			break;
		cdev_init(&majors[i].cdev, &inert_fops);
		majors[i].cdev.owner = THIS_MODULE;
		rc = cdev_add(&majors[i].cdev, majors[i].first, majors[i].minors);
		if (rc) {
			unregister_chrdev_region(majors[i].first, majors[i].minors);
			break;
		}
	}
	if (i < ARRAY_SIZE(majors)) {
		majors_exit(i);
		return rc;
	}
	return 0;
}

static void proc_exit(void)
{
	proc_remove(switch_root);
	proc_remove(nvlink_root);
}

static int proc_init(void)
{
	struct proc_dir_entry *capabilities;

	switch_root = proc_mkdir("driver/nvidia-nvswitch", NULL);
	nvlink_root = proc_mkdir("driver/nvidia-nvlink", NULL);
	if (!switch_root || !nvlink_root)
		goto fail;
	switch_devices = proc_mkdir("devices", switch_root);
	capabilities = proc_mkdir("capabilities", nvlink_root);
	if (!switch_devices || !capabilities ||
	    !proc_create_single("fabric-mgmt", 0400, capabilities, fabric_mgmt_show))
		goto fail;
	return 0;
fail:
	proc_exit();
	return -ENOMEM;
}

int nvidia_fabric_init(void)
{
	int rc;

	rc = proc_init();
	if (rc)
		return rc;
	rc = majors_init();
	if (rc)
		goto proc;
	rc = pci_register_driver(&switch_driver);
	if (rc)
		goto majors;
	return 0;
majors:
	majors_exit(ARRAY_SIZE(majors));
proc:
	proc_exit();
	return rc;
}

void nvidia_fabric_exit(void)
{
	pci_unregister_driver(&switch_driver);
	majors_exit(ARRAY_SIZE(majors));
	proc_exit();
}
