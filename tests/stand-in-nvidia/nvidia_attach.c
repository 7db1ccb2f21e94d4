// SPDX-License-Identifier: GPL-2.0
/*
 * What an attach costs: a device is initialised by its first user and shut
 * down by its last. Time is slept, a part of it under a lock that all devices
 * share.
 */
#include <linux/firmware.h>
#include <linux/hrtimer.h>
#include <linux/interrupt.h>
#include <linux/sched/signal.h>

#include "standin.h"

/* What the real failure message carries besides the status. */
#define DEFAULT_STAGE 0x22
#define MESSAGE_LINE  894
#define FIRMWARE_STAGE  0x61
#define FIRMWARE_STATUS 0x38

/* The RM API lock: shared by all devices. */
static DEFINE_MUTEX(rm_api_lock);

/*
 * The real one mostly waits for the GPU's firmware, so the time is slept.
 * In slices, so that a removal does not have to wait for all of it.
 */
static int sleep_us(struct gpu *gpu, u64 us)
{
	ktime_t end = ktime_add_us(ktime_get(), us);

	while (!READ_ONCE(gpu->gone) && !fatal_signal_pending(current)) {
		ktime_t slice = ktime_add_ms(ktime_get(), 100);

		if (standin_signs_of(gpu))
			lab_write(gpu, LAB_DOORBELL, 0);
		if (ktime_before(end, slice))
			slice = end;
		set_current_state(TASK_KILLABLE);
		schedule_hrtimeout_range(&slice, 50 * NSEC_PER_USEC, HRTIMER_MODE_ABS);
		if (!ktime_before(ktime_get(), end))
			return 0;
	}
	return -EINTR;
}

static int hang(struct gpu *gpu)
{
	bool with_lock = READ_ONCE(standin_hang_holds_lock);
	int rc;

	if (with_lock && mutex_lock_killable(&rm_api_lock))
		return -EINTR;
	rc = wait_event_killable(gpu->gone_wait, READ_ONCE(gpu->gone));
	if (with_lock)
		mutex_unlock(&rm_api_lock);
	return rc ?: -ENODEV;
}

/*
 * The global lock is taken at the beginning and at the end; in the middle,
 * while the firmware boots, it is dropped unless all of the time is under it.
 */
static int spend_attach_time(struct gpu *gpu)
{
	u64 total = (u64)standin_attach_ms_of(gpu) * USEC_PER_MSEC;
	u64 locked = total * clamp(READ_ONCE(standin_lock_permille), 0, 1000) / 1000;
	int rc;

	if (mutex_lock_killable(&rm_api_lock))
		return -EINTR;
	rc = sleep_us(gpu, locked / 2);
	if (!rc && locked < total) {
		mutex_unlock(&rm_api_lock);
		rc = sleep_us(gpu, total - locked);
		if (rc)
			return rc;
		if (mutex_lock_killable(&rm_api_lock))
			return -EINTR;
	}
	if (!rc)
		rc = sleep_us(gpu, locked - locked / 2);
	mutex_unlock(&rm_api_lock);
	return rc;
}

static irqreturn_t gpu_interrupt(int irq, void *data)
{
	struct gpu *gpu = data;

	atomic_inc(&gpu->interrupts);
	return IRQ_HANDLED;
}

static void gpu_irq_start(struct gpu *gpu)
{
	int rc = pci_alloc_irq_vectors(gpu->pdev, 1, 1, PCI_IRQ_MSIX);

	if (rc < 0) {
		dev_warn(&gpu->pdev->dev, "no MSI-X: %d\n", rc);
		return;
	}
	rc = request_irq(pci_irq_vector(gpu->pdev, 0), gpu_interrupt, 0, "nvidia", gpu);
	if (rc) {
		dev_warn(&gpu->pdev->dev, "no interrupt: %d\n", rc);
		pci_free_irq_vectors(gpu->pdev);
		return;
	}
	gpu->vectors = 1;
}

static void gpu_irq_stop(struct gpu *gpu)
{
	if (!gpu->vectors)
		return;
	free_irq(pci_irq_vector(gpu->pdev, 0), gpu);
	pci_free_irq_vectors(gpu->pdev);
	gpu->vectors = 0;
}

/* With gpu->lock. */
static int gpu_attach(struct gpu *gpu, u32 *adapter_status)
{
	const char *name = pci_name(gpu->pdev);
	u32 code;
	int rc;

	lab_write(gpu, LAB_ATTACH_COUNT, lab_read(gpu, LAB_ATTACH_COUNT) + 1);
	if (standin_firmware) {
		const struct firmware *firmware;

		rc = request_firmware_direct(&firmware, standin_firmware, &gpu->pdev->dev);
		if (rc) {
			*adapter_status = FIRMWARE_STATUS;
			pr_err("NVRM: GPU %s: no firmware %s: %d\n", name, standin_firmware, rc);
			pr_err("NVRM: GPU %s: RmInitAdapter failed! (0x%x:0x%x:%d)\n",
			       name, FIRMWARE_STAGE, *adapter_status, MESSAGE_LINE);
			return -EIO;
		}
		release_firmware(firmware);
	}
	gpu_irq_start(gpu);
	rc = standin_hang_of(gpu) ? hang(gpu) : spend_attach_time(gpu);
	if (rc) {
		gpu_irq_stop(gpu);
		return rc;
	}
	code = standin_fail_of(gpu);
	if (code) {
		u32 stage = code >> 16 ?: DEFAULT_STAGE;

		*adapter_status = code & 0xffff;
		pr_err("NVRM: GPU %s: RmInitAdapter failed! (0x%x:0x%x:%d)\n",
		       name, stage, *adapter_status, MESSAGE_LINE);
		pr_err("NVRM: GPU %s: rm_init_adapter failed, device minor number %u\n",
		       name, gpu->minor);
		gpu_irq_stop(gpu);
		return -EIO;
	}
	gpu->uuid_known = true;
	gpu->initialised = true;
	lab_write(gpu, LAB_DOORBELL, 0);
	return 0;
}

/* One more user, with gpu->lock; the first one pays. */
int gpu_get(struct gpu *gpu, u32 *adapter_status)
{
	int rc = 0;

	if (READ_ONCE(gpu->gone))
		return -ENODEV;
	if (!gpu->initialised)
		rc = gpu_attach(gpu, adapter_status);
	if (!rc)
		gpu->usage++;
	return rc;
}

/* One user less; the last one shuts the device down. */
void gpu_put(struct gpu *gpu)
{
	mutex_lock(&gpu->lock);
	if (--gpu->usage == 0) {
		gpu->initialised = false;
		gpu_irq_stop(gpu);
	}
	mutex_unlock(&gpu->lock);
}
