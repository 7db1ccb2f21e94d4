// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/nvidiaN and /dev/nvidiactl: who initialises, who waits, who closes.
 *
 * A blocking open initialises in the caller. A non-blocking one of a device
 * that is not initialised, or whose lock is busy, returns a descriptor at once
 * and initialises on the device's own thread; NV_ESC_WAIT_OPEN_COMPLETE waits
 * for the outcome. The device stays initialised while a descriptor is open.
 */
#include <linux/completion.h>
#include <linux/fs.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "standin.h"

static struct kthread_worker *close_queue;

struct open_file {
	struct gpu *gpu;             /* NULL for nvidiactl */
	struct completion open_complete;
	int open_rc;                 /* valid once complete, as is the next */
	u32 adapter_status;
	struct kthread_work open_work;
	struct kthread_work close_work;
};

/* A file may use the device from here until gpu_file_drop. */
static struct gpu *gpu_file_take(unsigned int minor)
{
	struct gpu *gpu, *found = NULL;

	mutex_lock(&gpu_list_lock);
	list_for_each_entry(gpu, &gpu_list, node) {
		if (gpu->minor == minor) {
			gpu->files++;
			found = gpu;
			break;
		}
	}
	mutex_unlock(&gpu_list_lock);
	return found;
}

static void gpu_file_drop(struct gpu *gpu)
{
	mutex_lock(&gpu_list_lock);
	/* Under the lock: after it the waiter may free the device. */
	if (--gpu->files == 0)
		wake_up_all(&gpu->gone_wait);
	mutex_unlock(&gpu_list_lock);
}

static bool gpu_unused(struct gpu *gpu)
{
	bool unused;

	mutex_lock(&gpu_list_lock);
	unused = gpu->files == 0;
	mutex_unlock(&gpu_list_lock);
	return unused;
}

void gpu_wait_unused(struct gpu *gpu)
{
	mutex_lock(&gpu_list_lock);
	list_del(&gpu->node);
	WRITE_ONCE(gpu->gone, true);
	if (gpu->files)
		pr_warn("NVRM: Attempting to remove device %s with non-zero usage count!\n",
			pci_name(gpu->pdev));
	wake_up_all(&gpu->gone_wait);
	mutex_unlock(&gpu_list_lock);
	wait_event(gpu->gone_wait, gpu_unused(gpu));
}

static void complete_open(struct open_file *of, int rc)
{
	of->open_rc = rc;
	complete_all(&of->open_complete);
}

static void open_deferred(struct kthread_work *work)
{
	struct open_file *of = container_of(work, struct open_file, open_work);
	int rc;

	mutex_lock(&of->gpu->lock);
	rc = gpu_get(of->gpu, &of->adapter_status);
	mutex_unlock(&of->gpu->lock);
	complete_open(of, rc);
}

static void close_now(struct open_file *of)
{
	struct gpu *gpu = of->gpu;

	if (of->open_rc == 0)
		gpu_put(gpu);
	kfree(of);
	gpu_file_drop(gpu);
}

static void close_deferred(struct kthread_work *work)
{
	struct open_file *of = container_of(work, struct open_file, close_work);

	wait_for_completion(&of->open_complete);
	close_now(of);
}

/* True with gpu->lock if the open can be done at once without an attach. */
static bool try_lock_initialised(struct gpu *gpu)
{
	if (!mutex_trylock(&gpu->lock))
		return false;
	if (gpu->initialised)
		return true;
	mutex_unlock(&gpu->lock);
	return false;
}

static int open_gpu(struct file *file, struct open_file *of)
{
	struct gpu *gpu = of->gpu;
	int rc;

	if ((file->f_flags & O_NONBLOCK) && NVreg_EnableNonblockingOpen) {
		if (!try_lock_initialised(gpu)) {
			kthread_init_work(&of->open_work, open_deferred);
			kthread_queue_work(gpu->open_queue, &of->open_work);
			return 0;
		}
	} else if (mutex_lock_killable(&gpu->lock)) {
		return -EINTR;
	}
	rc = gpu_get(gpu, &of->adapter_status);
	mutex_unlock(&gpu->lock);
	if (!rc)
		complete_open(of, 0);
	return rc;
}

static int nvidia_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);
	struct open_file *of;
	int rc;

	of = kzalloc(sizeof(*of), GFP_KERNEL);
	if (!of)
		return -ENOMEM;
	init_completion(&of->open_complete);
	if (minor == NV_MINOR_CTL) {
		complete_open(of, 0);
	} else {
		of->gpu = gpu_file_take(minor);
		if (!of->gpu) {
			kfree(of);
			return -ENODEV;
		}
		rc = open_gpu(file, of);
		if (rc) {
			gpu_file_drop(of->gpu);
			kfree(of);
			return rc;
		}
	}
	file->private_data = of;
	return 0;
}

/*
 * Waits for an open that is still going on. A signal hands the rest to the
 * queue of deferred closes, one for all devices as in the real one. As awkward
 * as the real one, too: a single-threaded process that dies has no signal
 * pending any more, so its exit waits here, and nothing can kill it.
 */
static int nvidia_release(struct inode *inode, struct file *file)
{
	struct open_file *of = file->private_data;

	if (!of->gpu) {
		kfree(of);
	} else if (wait_for_completion_interruptible(&of->open_complete)) {
		kthread_init_work(&of->close_work, close_deferred);
		kthread_queue_work(close_queue, &of->close_work);
	} else {
		close_now(of);
	}
	return 0;
}

static long nvidia_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct open_file *of = file->private_data;
	struct nv_wait_open_complete result;

	if (wait_for_completion_interruptible(&of->open_complete))
		return -ERESTARTSYS;
	if (cmd == NV_ESC_WAIT_OPEN_COMPLETE) {
		result.rc = of->open_rc;
		result.adapter_status = of->adapter_status;
		return copy_to_user((void __user *)arg, &result, sizeof(result)) ? -EFAULT : 0;
	}
	return of->open_rc ? -EIO : -EINVAL;
}

/* Never says that an open is complete: POLLERR until then, silence after. */
static __poll_t nvidia_poll(struct file *file, poll_table *wait)
{
	struct open_file *of = file->private_data;

	return completion_done(&of->open_complete) && !of->open_rc ? 0 : EPOLLERR;
}

/* Not in the real one: lets a container show which GPU it was given. */
static ssize_t nvidia_read(struct file *file, char __user *buffer, size_t size, loff_t *at)
{
	struct open_file *of = file->private_data;
	char line[128];
	int length;

	if (!of->gpu)
		return -EINVAL;
	if (wait_for_completion_interruptible(&of->open_complete))
		return -ERESTARTSYS;
	if (of->open_rc)
		return -EIO;
	length = scnprintf(line, sizeof(line), "%s %s %s\n",
			   pci_name(of->gpu->pdev), of->gpu->model, of->gpu->uuid);
	return simple_read_from_buffer(buffer, size, at, line, length);
}

static const struct file_operations nvidia_fops = {
	.owner = THIS_MODULE,
	.open = nvidia_open,
	.release = nvidia_release,
	.unlocked_ioctl = nvidia_ioctl,
	.compat_ioctl = nvidia_ioctl,
	.poll = nvidia_poll,
	.read = nvidia_read,
};

static struct cdev gpu_cdev, ctl_cdev;

/* Two regions of one major, so that /proc/devices lists both names. */
int nvidia_chrdev_init(void)
{
	dev_t gpus = MKDEV(NV_MAJOR, 0), ctl = MKDEV(NV_MAJOR, NV_MINOR_CTL);
	int rc;

	close_queue = kthread_create_worker(0, "nv_queue");
	if (IS_ERR(close_queue))
		return PTR_ERR(close_queue);
	rc = register_chrdev_region(gpus, NV_MAX_GPUS, "nvidia");
	if (rc)
		goto queue;
	rc = register_chrdev_region(ctl, 1, "nvidiactl");
	if (rc)
		goto gpus;
	cdev_init(&gpu_cdev, &nvidia_fops);
	gpu_cdev.owner = THIS_MODULE;
	rc = cdev_add(&gpu_cdev, gpus, NV_MAX_GPUS);
	if (rc)
		goto ctl;
	cdev_init(&ctl_cdev, &nvidia_fops);
	ctl_cdev.owner = THIS_MODULE;
	rc = cdev_add(&ctl_cdev, ctl, 1);
	if (rc)
		goto cdev;
	return 0;
cdev:
	cdev_del(&gpu_cdev);
ctl:
	unregister_chrdev_region(ctl, 1);
gpus:
	unregister_chrdev_region(gpus, NV_MAX_GPUS);
queue:
	kthread_destroy_worker(close_queue);
	return rc;
}

void nvidia_chrdev_exit(void)
{
	cdev_del(&ctl_cdev);
	cdev_del(&gpu_cdev);
	unregister_chrdev_region(MKDEV(NV_MAJOR, NV_MINOR_CTL), 1);
	unregister_chrdev_region(MKDEV(NV_MAJOR, 0), NV_MAX_GPUS);
	kthread_destroy_worker(close_queue);
}
