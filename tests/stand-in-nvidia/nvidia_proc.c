// SPDX-License-Identifier: GPL-2.0
/*
 * /proc/driver/nvidia: what a device manager reads instead of asking NVML.
 */
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "standin.h"

static struct proc_dir_entry *root, *gpus, *capabilities;

static int version_show(struct seq_file *s, void *unused)
{
	seq_puts(s, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " STANDIN_RELEASE "  (stand-in)\n");
	seq_puts(s, "GCC version:  " CONFIG_CC_VERSION_TEXT "\n");
	return 0;
}

static int params_show(struct seq_file *s, void *unused)
{
	static const struct {
		const char *name;
		const int *value;
	} rows[] = {
		{ "ModifyDeviceFiles", &NVreg_ModifyDeviceFiles },
		{ "DeviceFileUID", &NVreg_DeviceFileUID },
		{ "DeviceFileGID", &NVreg_DeviceFileGID },
		{ "DeviceFileMode", &NVreg_DeviceFileMode },
		{ "NvLinkDisable", &NVreg_NvLinkDisable },
		{ "EnableGpuFirmware", &NVreg_EnableGpuFirmware },
		{ "OpenRmEnableUnsupportedGpus", &NVreg_OpenRmEnableUnsupportedGpus },
		{ "EnableNonblockingOpen", &NVreg_EnableNonblockingOpen },
	};
	int i;

	for (i = 0; i < ARRAY_SIZE(rows); i++)
		seq_printf(s, "%s: %d\n", rows[i].name, *rows[i].value);
	seq_printf(s, "RegistryDwords: \"%s\"\n", NVreg_RegistryDwords ?: "");
	return 0;
}

/* The capability files that nvidia-modprobe and container tools parse. */
static int capability_show(struct seq_file *s, void *unused)
{
	seq_printf(s, "DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: 1\n",
		   (int)(long)s->private >> 16, (int)(long)s->private & 0xffff);
	return 0;
}

#define CAPABILITY(minor, mode) ((void *)(long)((minor) << 16 | (mode)))

/* The instances of each GPU in MIG mode. */
static struct proc_dir_entry *divided[NV_MAX_GPUS];
static DEFINE_MUTEX(divided_lock);

/* The real one's numbers: 15 GPU instances per GPU, each with up to 8 compute instances. */
#define INSTANCE_MINOR(gpu, instance) (3 + (gpu) * 135 + (instance) * 9)

static int show_instance(struct proc_dir_entry *mig, unsigned int gpu, unsigned int number)
{
	struct proc_dir_entry *instance, *compute;
	char name[16];

	snprintf(name, sizeof(name), "gi%u", number);
	instance = proc_mkdir(name, mig);
	compute = instance ? proc_mkdir("ci0", instance) : NULL;
	if (!compute ||
	    !proc_create_single_data("access", 0444, instance, capability_show,
				     CAPABILITY(INSTANCE_MINOR(gpu, number), 0444)) ||
	    !proc_create_single_data("access", 0444, compute, capability_show,
				     CAPABILITY(INSTANCE_MINOR(gpu, number) + 1, 0444)))
		return -ENOMEM;
	return 0;
}

static int minor_at(const char *address)
{
	struct gpu *gpu;
	int minor = -ENODEV;

	mutex_lock(&gpu_list_lock);
	list_for_each_entry(gpu, &gpu_list, node)
		if (!strcmp(pci_name(gpu->pdev), address))
			minor = gpu->minor;
	mutex_unlock(&gpu_list_lock);
	return minor;
}

/* Not in the real one: "ADDRESS INSTANCE ..." from the stand-in for NVML. */
static ssize_t mig_write(struct file *file, const char __user *from, size_t count, loff_t *at)
{
	char *text, *rest, *word, name[16];
	struct proc_dir_entry *mig;
	unsigned int number;
	int minor, error = 0;

	text = memdup_user_nul(from, min_t(size_t, count, 256));
	if (IS_ERR(text))
		return PTR_ERR(text);
	rest = strim(text);
	word = strsep(&rest, " ");
	minor = minor_at(word);
	if (minor < 0 || minor >= NV_MAX_GPUS) {
		kfree(text);
		return -ENODEV;
	}
	mutex_lock(&divided_lock);
	proc_remove(divided[minor]);
	snprintf(name, sizeof(name), "gpu%d", minor);
	divided[minor] = proc_mkdir(name, capabilities);
	mig = divided[minor] ? proc_mkdir("mig", divided[minor]) : NULL;
	if (!mig)
		error = -ENOMEM;
	while (!error && (word = strsep(&rest, " "))) {
		error = kstrtouint(word, 10, &number);
		if (!error)
			error = number < 15 ? show_instance(mig, minor, number) : -EINVAL;
	}
	mutex_unlock(&divided_lock);
	kfree(text);
	return error ?: count;
}

static const struct proc_ops mig_ops = { .proc_write = mig_write };

static int information_show(struct seq_file *s, void *unused)
{
	struct gpu *gpu = s->private;

	seq_printf(s, "Model: \t\t %s\n", gpu->model);
	seq_printf(s, "IRQ:   \t\t %d\n", gpu->vectors ? pci_irq_vector(gpu->pdev, 0) : gpu->pdev->irq);
	/* Unknown before the first attach. */
	seq_printf(s, "GPU UUID: \t %s\n",
		   gpu->uuid_known ? gpu->uuid : "GPU-????????-????-????-????-????????????");
	seq_printf(s, "Video BIOS: \t %s\n", gpu->uuid_known ? "96.00.74.00.01" : "??.??.??.??.??");
	seq_puts(s, "Bus Type: \t PCIe\n");
	seq_puts(s, "DMA Size: \t 52 bits\n");
	seq_puts(s, "DMA Mask: \t 0xfffffffffffff\n");
	seq_printf(s, "Bus Location: \t %s\n", pci_name(gpu->pdev));
	seq_printf(s, "Device Minor: \t %u\n", gpu->minor);
	seq_puts(s, "GPU Firmware: \t " STANDIN_RELEASE "\n");
	seq_puts(s, "GPU Excluded:\t No\n");
	return 0;
}

/* Not in the real one: what a test wants to know. */
static int standin_show(struct seq_file *s, void *unused)
{
	struct gpu *gpu = s->private;

	seq_printf(s, "attach_ms: %u\nfail: 0x%x\nhang: %d\n",
		   standin_attach_ms_of(gpu), standin_fail_of(gpu), standin_hang_of(gpu));
	/* Without the lock: it is held for as long as an attach takes. */
	seq_printf(s, "attach_count: %u\nindex: %u\ninitialised: %d\nusage: %u\ninterrupts: %d\nboot_0: 0x%08x\n",
		   lab_read(gpu, LAB_ATTACH_COUNT), lab_read(gpu, LAB_INDEX),
		   READ_ONCE(gpu->initialised), READ_ONCE(gpu->usage),
		   atomic_read(&gpu->interrupts), readl(gpu->bar0 + PMC_BOOT_0));
	return 0;
}

int nvidia_proc_add(struct gpu *gpu)
{
	gpu->proc = proc_mkdir(pci_name(gpu->pdev), gpus);
	if (!gpu->proc ||
	    !proc_create_single_data("information", 0444, gpu->proc, information_show, gpu) ||
	    !proc_create_single_data("standin", 0444, gpu->proc, standin_show, gpu)) {
		proc_remove(gpu->proc);
		return -ENOMEM;
	}
	return 0;
}

void nvidia_proc_remove(struct gpu *gpu)
{
	proc_remove(gpu->proc);
}

int nvidia_proc_init(void)
{
	struct proc_dir_entry *mig;

	root = proc_mkdir("driver/nvidia", NULL);
	if (!root)
		return -ENOMEM;
	gpus = proc_mkdir("gpus", root);
	capabilities = proc_mkdir("capabilities", root);
	mig = capabilities ? proc_mkdir("mig", capabilities) : NULL;
	if (!gpus || !mig ||
	    !proc_create_single("version", 0444, root, version_show) ||
	    !proc_create_single("params", 0444, root, params_show) ||
	    !proc_create("standin-mig", 0200, root, &mig_ops) ||
	    !proc_create_single_data("config", 0400, mig, capability_show, CAPABILITY(1, 0400)) ||
	    !proc_create_single_data("monitor", 0444, mig, capability_show, CAPABILITY(2, 0444)) ||
	    !proc_create_single_data("fabric-imex-mgmt", 0400, capabilities, capability_show,
				     CAPABILITY(3, 0400))) {
		proc_remove(root);
		return -ENOMEM;
	}
	return 0;
}

void nvidia_proc_exit(void)
{
	proc_remove(root);
}
