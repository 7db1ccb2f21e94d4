// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in nvidia-uvm.ko: a dynamic major and nodes that open.
 */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

/* nvidia-uvm (0) and nvidia-uvm-tools (1). */
#define UVM_MINORS 2

const char *nvidia_standin_release(void);

static dev_t first;
static struct cdev cdev;

static const struct file_operations uvm_fops = {
	.owner = THIS_MODULE,
	.open = nonseekable_open,
};

static int __init uvm_init(void)
{
	int rc;

	rc = alloc_chrdev_region(&first, 0, UVM_MINORS, "nvidia-uvm");
	if (rc)
		return rc;
	cdev_init(&cdev, &uvm_fops);
	cdev.owner = THIS_MODULE;
	rc = cdev_add(&cdev, first, UVM_MINORS);
	if (rc) {
		unregister_chrdev_region(first, UVM_MINORS);
		return rc;
	}
	pr_info("nvidia-uvm: Loaded the UVM driver, major device number %d. (stand-in for %s)\n",
		MAJOR(first), nvidia_standin_release());
	return 0;
}

static void __exit uvm_exit(void)
{
	cdev_del(&cdev);
	unregister_chrdev_region(first, UVM_MINORS);
}

module_init(uvm_init);
module_exit(uvm_exit);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("stand-in for the NVIDIA unified memory driver: device numbers for tests, no hardware");
