/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for libnvidia-ml.so.1: as much of NVML as firstlight-gpu-settings
 * calls, for GPUs that are divided as an H200 is. Like the real one it answers
 * error codes, refuses an instance without a placement, a mode change while
 * processes compute, and a structure of another version.
 *
 * Everything is below one directory, $STAND_IN_NVML or else /etc/stand-in-nvml:
 *   gpus               addresses, one per line; else those of /proc/driver/nvidia/gpus
 *   faults             lines "FUNCTION ADDRESS CODE|hang"; "*" is every GPU, "system" none
 *   confidential       if it is there, confidential computing is on
 *   ampere             if it is there, MIG mode changes by a reset only
 *   ADDRESS/processes  how many processes compute on the GPU
 *   ADDRESS/KEY        what the GPU has: power, clocks, memory-clock, compute-mode,
 *                      mig, pending, instances (lines "ID PROFILE START COMPUTE"),
 *                      module-id and serial, which it does not support if they are not there
 *   system/ready
 * One fault more can be on the kernel's command line: stand_in_nvml.fault=FUNCTION,ADDRESS,CODE
 */
#include <ctype.h>
#include <dirent.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
	OK = 0,
	UNINITIALIZED = 1,
	INVALID_ARGUMENT = 2,
	NOT_SUPPORTED = 3,
	NOT_FOUND = 6,
	INSUFFICIENT_SIZE = 7,
	RESET_REQUIRED = 16,
	IN_USE = 19,
	INSUFFICIENT_RESOURCES = 23,
	VERSION_MISMATCH = 25,
	MOST = 16,
	MOST_INSTANCES = 8,
	NO_COMPUTE = 99,
};

#define EXPORT __attribute__((visibility("default")))
#define VERSION(type, number) ((unsigned int)sizeof(type) | (number) << 24)

typedef int result;

struct gpu {
	char pci[16];
};

/* What an H200 has: the number in NVML's list, nvidia-smi's, slices, places. */
static const struct profile {
	unsigned int number, id, slices, most, size, starts[8];
	const char *name;
} profiles[] = {
	{ 0, 19, 1, 7, 1, { 0, 1, 2, 3, 4, 5, 6 }, "MIG 1g.18gb" },
	{ 7, 20, 1, 1, 1, { 0, 1, 2, 3, 4, 5, 6 }, "MIG 1g.18gb+me" },
	{ 9, 15, 1, 4, 2, { 0, 2, 4, 6 }, "MIG 1g.35gb" },
	{ 1, 14, 2, 3, 2, { 0, 2, 4 }, "MIG 2g.35gb" },
	{ 2, 9, 3, 2, 4, { 0, 4 }, "MIG 3g.71gb" },
	{ 3, 5, 4, 1, 4, { 0 }, "MIG 4g.71gb" },
	{ 4, 0, 7, 1, 8, { 0 }, "MIG 7g.141gb" },
};
enum { PROFILES = sizeof(profiles) / sizeof(profiles[0]) };

static const unsigned int places_of[PROFILES] = { 7, 7, 4, 3, 2, 1, 1 };

struct instance {
	unsigned int id, profile, start, compute;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct gpu gpus[MOST];
static unsigned int number;
static int begun;

static const char *home(void)
{
	const char *directory = getenv("STAND_IN_NVML");

	return directory ? directory : "/etc/stand-in-nvml";
}

static void path_of(char *path, const char *object, const char *key)
{
	snprintf(path, 512, "%s/%s%s%s", home(), object, *object ? "/" : "", key);
}

static int there(const char *key)
{
	char path[512];

	path_of(path, "", key);
	return !access(path, F_OK);
}

static unsigned int get(const char *object, const char *key, unsigned int otherwise)
{
	char path[512];
	FILE *file;

	path_of(path, object, key);
	file = fopen(path, "r");
	if (!file)
		return otherwise;
	if (fscanf(file, "%u", &otherwise) != 1)
		otherwise = 0;
	fclose(file);
	return otherwise;
}

/* Writes what a GPU has from now on, and says so, which the real one does not. */
static result set(const char *object, const char *key, const char *format, ...)
{
	char path[512], text[512];
	va_list list;
	FILE *file;

	va_start(list, format);
	vsnprintf(text, sizeof(text), format, list);
	va_end(list);
	path_of(path, object, "");
	mkdir(path, 0755);
	path_of(path, object, key);
	file = fopen(path, "w");
	if (!file)
		return 999;
	fprintf(file, "%s\n", text);
	fclose(file);
	fprintf(stderr, "stand-in NVML: %s %s %s\n", object, key, text);
	return OK;
}

/* What is to go wrong with this call. */
static result fault(const char *function, const char *object)
{
	char text[4096], *line, *save, path[512], *at;
	FILE *file;
	size_t length;
	int round;

	if (!begun)
		return UNINITIALIZED;
	for (round = 0; round < 2; round++) {
		path_of(path, "", "faults");
		file = fopen(round ? "/proc/cmdline" : path, "r");
		if (!file)
			continue;
		length = fread(text, 1, sizeof(text) - 1, file);
		fclose(file);
		text[length] = 0;
		at = text;
		if (round) {
			at = strstr(text, "stand_in_nvml.fault=");
			if (!at)
				continue;
			at += strlen("stand_in_nvml.fault=");
			at[strcspn(at, " \n")] = 0;
			for (line = at; *line; line++)
				if (*line == ',')
					*line = ' ';
		}
		for (line = strtok_r(at, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
			char name[80], whom[32], what[32];

			if (sscanf(line, "%79s %31s %31s", name, whom, what) != 3 || strcmp(name, function) ||
			    (strcmp(whom, "*") && strcmp(whom, object)))
				continue;
			while (!strcmp(what, "hang"))
				pause();
			return atoi(what);
		}
	}
	return OK;
}

#define TRY(object)                                         \
	do {                                                \
		result refused = fault(__func__, object);   \
		if (refused)                                \
			return refused;                     \
	} while (0)

static int is_gpu(const void *device)
{
	return device >= (void *)gpus && device < (void *)(gpus + number);
}

#define GPU(device)                              \
	struct gpu *gpu = (device);              \
	if (!is_gpu(gpu))                        \
		return INVALID_ARGUMENT;         \
	TRY(gpu->pci)

EXPORT const char *nvmlErrorString(result code)
{
	switch (code) {
	case OK: return "Success";
	case UNINITIALIZED: return "Uninitialized";
	case INVALID_ARGUMENT: return "Invalid Argument";
	case NOT_SUPPORTED: return "Not Supported";
	case 4: return "Insufficient Permissions";
	case NOT_FOUND: return "Not Found";
	case 15: return "GPU is lost";
	case RESET_REQUIRED: return "GPU requires reset";
	case IN_USE: return "In use by another client";
	case INSUFFICIENT_RESOURCES: return "Insufficient Resources";
	default: return "Unknown Error";
	}
}

static int by_name(const void *one, const void *other)
{
	return strcmp(one, other);
}

EXPORT result nvmlInit_v2(void)
{
	char path[512], line[64];
	struct dirent *entry;
	FILE *file;
	DIR *directory;

	pthread_mutex_lock(&lock);
	number = 0;
	path_of(path, "", "gpus");
	file = fopen(path, "r");
	directory = file ? NULL : opendir("/proc/driver/nvidia/gpus");
	while (file && number < MOST && fgets(line, sizeof(line), file)) {
		line[strcspn(line, " \n")] = 0;
		snprintf(gpus[number++].pci, sizeof(gpus[0].pci), "%.15s", line);
	}
	while (directory && number < MOST && (entry = readdir(directory)))
		if (isxdigit((unsigned char)entry->d_name[0]))
			snprintf(gpus[number++].pci, sizeof(gpus[0].pci), "%.15s", entry->d_name);
	if (file)
		fclose(file);
	if (directory)
		closedir(directory);
	qsort(gpus, number, sizeof(gpus[0]), by_name);
	begun = 1;
	pthread_mutex_unlock(&lock);
	return fault(__func__, "system");
}

EXPORT result nvmlShutdown(void)
{
	begun = 0;
	return OK;
}

EXPORT result nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	TRY("system");
	snprintf(version, length, "550.163.01");
	return OK;
}

EXPORT result nvmlDeviceGetCount_v2(unsigned int *count)
{
	TRY("system");
	*count = number;
	return OK;
}

EXPORT result nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct gpu **device)
{
	TRY("system");
	if (index >= number)
		return INVALID_ARGUMENT;
	*device = gpus + index;
	return OK;
}

EXPORT result nvmlDeviceGetHandleByPciBusId_v2(const char *pci, struct gpu **device)
{
	unsigned int at;

	TRY(pci);
	for (at = 0; at < number; at++)
		if (!strcmp(gpus[at].pci, pci)) {
			*device = gpus + at;
			return OK;
		}
	return NOT_FOUND;
}

struct pci_info {
	char legacy[16];
	unsigned int domain, bus, device, id, subsystem;
	char text[32];
};

EXPORT result nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info)
{
	GPU(device);
	memset(info, 0, sizeof(*info));
	if (sscanf(gpu->pci, "%x:%x:%x", &info->domain, &info->bus, &info->device) != 3)
		return 999;
	return OK;
}

EXPORT result nvmlDeviceGetName(void *device, char *name, unsigned int length)
{
	GPU(device);
	snprintf(name, length, "stand-in H200");
	return OK;
}

EXPORT result nvmlDeviceGetModuleId(void *device, unsigned int *id)
{
	GPU(device);
	*id = get(gpu->pci, "module-id", NO_COMPUTE);
	return *id == NO_COMPUTE ? NOT_SUPPORTED : OK;
}

EXPORT result nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length)
{
	GPU(device);
	if (length < 41)
		return INSUFFICIENT_SIZE;
	snprintf(uuid, length, "GPU-00000000-0000-0000-0000-0000%.2s%.2s%.2s00", gpu->pci, gpu->pci + 5, gpu->pci + 8);
	return OK;
}

EXPORT result nvmlDeviceGetSerial(void *device, char *serial, unsigned int length)
{
	unsigned int number;

	GPU(device);
	number = get(gpu->pci, "serial", 0);
	if (!number)
		return NOT_SUPPORTED;
	snprintf(serial, length, "%u", number);
	return OK;
}

EXPORT result nvmlDeviceGetArchitecture(void *device, unsigned int *architecture)
{
	GPU(device);
	*architecture = there("ampere") ? 7 : 9;
	return OK;
}

EXPORT result nvmlDeviceGetComputeMode(void *device, unsigned int *mode)
{
	GPU(device);
	*mode = get(gpu->pci, "compute-mode", 0);
	return OK;
}

EXPORT result nvmlDeviceSetComputeMode(void *device, unsigned int mode)
{
	GPU(device);
	if (mode > 3 || mode == 1)
		return NOT_SUPPORTED;
	return set(gpu->pci, "compute-mode", "%u", mode);
}

EXPORT result nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned int *least, unsigned int *most)
{
	GPU(device);
	*least = 200000;
	*most = 700000;
	return OK;
}

EXPORT result nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned int *limit)
{
	GPU(device);
	*limit = 700000;
	return OK;
}

EXPORT result nvmlDeviceGetPowerManagementLimit(void *device, unsigned int *limit)
{
	GPU(device);
	*limit = get(gpu->pci, "power", 700000);
	return OK;
}

EXPORT result nvmlDeviceSetPowerManagementLimit(void *device, unsigned int limit)
{
	GPU(device);
	if (limit < 200000 || limit > 700000)
		return INVALID_ARGUMENT;
	return set(gpu->pci, "power", "%u", limit);
}

static result clocks(unsigned int *count, unsigned int *list, unsigned int first, unsigned int last, unsigned int step)
{
	unsigned int found = (last - first) / step + 1, room = *count, at;

	*count = found;
	if (room < found)
		return INSUFFICIENT_SIZE;
	/* The highest first. */
	for (at = 0; at < found; at++)
		list[at] = last - at * step;
	return OK;
}

EXPORT result nvmlDeviceGetSupportedMemoryClocks(void *device, unsigned int *count, unsigned int *list)
{
	GPU(device);
	return clocks(count, list, 2619, 3201, 582);
}

EXPORT result nvmlDeviceGetSupportedGraphicsClocks(void *device, unsigned int memory, unsigned int *count,
						   unsigned int *list)
{
	GPU(device);
	if (memory != 3201 && memory != 2619)
		return NOT_FOUND;
	return clocks(count, list, 345, 1980, 15);
}

EXPORT result nvmlDeviceSetGpuLockedClocks(void *device, unsigned int low, unsigned int high)
{
	GPU(device);
	if (low > high)
		return INVALID_ARGUMENT;
	return set(gpu->pci, "clocks", "%u,%u", low, high);
}

EXPORT result nvmlDeviceResetGpuLockedClocks(void *device)
{
	GPU(device);
	return set(gpu->pci, "clocks", "free");
}

EXPORT result nvmlDeviceSetMemoryLockedClocks(void *device, unsigned int low, unsigned int high)
{
	GPU(device);
	return set(gpu->pci, "memory-clock", "%u,%u", low, high);
}

EXPORT result nvmlDeviceResetMemoryLockedClocks(void *device)
{
	GPU(device);
	return set(gpu->pci, "memory-clock", "free");
}

struct process {
	unsigned int pid;
	unsigned long long memory;
	unsigned int instance, compute;
};

EXPORT result nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, struct process *list)
{
	unsigned int found, room = *count, at;
	GPU(device);

	found = get(gpu->pci, "processes", 0);
	*count = found;
	if (room < found)
		return INSUFFICIENT_SIZE;
	for (at = 0; at < found; at++)
		list[at] = (struct process){ .pid = 4000 + at };
	return OK;
}

/* MIG */

EXPORT result nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending)
{
	GPU(device);
	*current = get(gpu->pci, "mig", 0);
	*pending = get(gpu->pci, "pending", *current);
	return OK;
}

static unsigned int load(const struct gpu *gpu, struct instance *list)
{
	unsigned int count = 0;
	char path[512];
	FILE *file;

	path_of(path, gpu->pci, "instances");
	file = fopen(path, "r");
	if (!file)
		return 0;
	while (count < MOST_INSTANCES &&
	       fscanf(file, "%u %u %u %u", &list[count].id, &list[count].profile, &list[count].start, &list[count].compute) == 4)
		count++;
	fclose(file);
	return count;
}

/* Reports instances to the stand-in driver, which shows them where the real one does. */
static void report_to_driver(const struct gpu *gpu, const struct instance *list, unsigned int count)
{
	FILE *file = fopen("/proc/driver/nvidia/standin-mig", "w");
	unsigned int at;

	if (!file)
		return;
	fprintf(file, "%s", gpu->pci);
	for (at = 0; at < count; at++)
		if (list[at].compute != NO_COMPUTE)
			fprintf(file, " %u", list[at].id);
	fclose(file);
}

static result save(const struct gpu *gpu, const struct instance *list, unsigned int count)
{
	char text[400] = "";
	unsigned int at;
	size_t end = 0;

	for (at = 0; at < count; at++)
		end += snprintf(text + end, sizeof(text) - end, "%s%u %u %u %u", at ? "\n" : "", list[at].id, list[at].profile,
				list[at].start, list[at].compute);
	report_to_driver(gpu, list, count);
	return set(gpu->pci, "instances", "%s", text);
}

EXPORT result nvmlDeviceSetMigMode(void *device, unsigned int mode, result *activation)
{
	struct instance list[MOST_INSTANCES];
	GPU(device);

	*activation = OK;
	if (mode > 1)
		return INVALID_ARGUMENT;
	if (!mode && load(gpu, list))
		return IN_USE;
	if (get(gpu->pci, "processes", 0)) {
		*activation = IN_USE;
		return set(gpu->pci, "pending", "%u", mode);
	}
	if (there("ampere") && get(gpu->pci, "mig", 0) != mode) {
		*activation = RESET_REQUIRED;
		return set(gpu->pci, "pending", "%u", mode);
	}
	set(gpu->pci, "pending", "%u", mode);
	return set(gpu->pci, "mig", "%u", mode);
}

static const struct profile *profile_of(unsigned int id)
{
	int at;

	for (at = 0; at < PROFILES; at++)
		if (profiles[at].id == id)
			return profiles + at;
	return NULL;
}

/* Slices that are taken, one bit each. */
static unsigned int taken(const struct instance *list, unsigned int count)
{
	unsigned int at, bits = 0;

	for (at = 0; at < count; at++) {
		const struct profile *profile = profile_of(list[at].profile);

		if (profile)
			bits |= ((1u << profile->size) - 1) << list[at].start;
	}
	return bits;
}

struct profile_info {
	unsigned int version, id, p2p, slices, most, multiprocessors, engines[5];
	unsigned long long memory;
	char name[96];
};

EXPORT result nvmlDeviceGetGpuInstanceProfileInfoV(void *device, unsigned int kind, struct profile_info *info)
{
	int at;
	GPU(device);

	if (info->version != VERSION(struct profile_info, 2))
		return VERSION_MISMATCH;
	if (kind > 16)
		return INVALID_ARGUMENT;
	if (!get(gpu->pci, "mig", 0))
		return NOT_SUPPORTED;
	for (at = 0; at < PROFILES; at++)
		if (profiles[at].number == kind) {
			memset(info, 0, sizeof(*info));
			info->id = profiles[at].id;
			info->slices = profiles[at].slices;
			info->most = profiles[at].most;
			info->multiprocessors = profiles[at].slices * 16;
			snprintf(info->name, sizeof(info->name), "%s", profiles[at].name);
			return OK;
		}
	return NOT_SUPPORTED;
}

struct placement {
	unsigned int start, size;
};

EXPORT result nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *device, unsigned int id, struct placement *list,
							     unsigned int *count)
{
	const struct profile *profile = profile_of(id);
	unsigned int at;
	GPU(device);

	if (!profile)
		return NOT_SUPPORTED;
	*count = places_of[profile - profiles];
	for (at = 0; list && at < *count; at++)
		list[at] = (struct placement){ profile->starts[at], profile->size };
	return OK;
}

EXPORT result nvmlDeviceGetGpuInstanceRemainingCapacity(void *device, unsigned int id, unsigned int *count)
{
	const struct profile *profile = profile_of(id);
	struct instance list[MOST_INSTANCES];
	unsigned int at, bits;
	GPU(device);

	if (!profile)
		return NOT_SUPPORTED;
	bits = taken(list, load(gpu, list));
	for (*count = at = 0; at < places_of[profile - profiles]; at++)
		if (!(bits & ((1u << profile->size) - 1) << profile->starts[at]))
			++*count;
	if (*count > profile->most)
		*count = profile->most;
	return OK;
}

/* A handle of an instance: the GPU's place and the instance's number. */
static void *handle(const struct gpu *gpu, unsigned int id)
{
	return (void *)(uintptr_t)(0x10000 + (gpu - gpus) * 256 + id);
}

/* The same, with a bit for the compute instance in it. */
enum { COMPUTE_BIT = 0x100000 };

static struct gpu *gpu_of(const void *handle, unsigned int *id)
{
	uintptr_t value = ((uintptr_t)handle & ~(uintptr_t)COMPUTE_BIT) - 0x10000;

	*id = value % 256;
	return value / 256 < number ? gpus + value / 256 : NULL;
}

static int find(const struct instance *list, unsigned int count, unsigned int id)
{
	unsigned int at;

	for (at = 0; at < count; at++)
		if (list[at].id == id)
			return at;
	return -1;
}

#define INSTANCE(handle)                                                 \
	struct instance list[MOST_INSTANCES];                            \
	unsigned int id, count;                                          \
	struct gpu *gpu = gpu_of(handle, &id);                           \
	int at;                                                          \
	if (!gpu)                                                        \
		return INVALID_ARGUMENT;                                 \
	TRY(gpu->pci);                                                   \
	count = load(gpu, list);                                         \
	at = find(list, count, id);                                      \
	if (at < 0)                                                      \
		return NOT_FOUND

EXPORT result nvmlDeviceCreateGpuInstanceWithPlacement(void *device, unsigned int id, const struct placement *place,
						       void **made)
{
	const struct profile *profile = profile_of(id);
	struct instance list[MOST_INSTANCES];
	unsigned int count, at, bits, same = 0;
	GPU(device);

	if (!profile || !get(gpu->pci, "mig", 0))
		return NOT_SUPPORTED;
	for (at = 0; at < places_of[profile - profiles] && profile->starts[at] != place->start; at++)
		;
	if (at == places_of[profile - profiles] || place->size != profile->size)
		return INVALID_ARGUMENT;
	count = load(gpu, list);
	bits = ((1u << profile->size) - 1) << place->start;
	for (at = 0; at < count; at++)
		same += list[at].profile == id;
	if (count == MOST_INSTANCES || same == profile->most || bits & taken(list, count))
		return INSUFFICIENT_RESOURCES;
	/* Numbers begin with 1, as 0 is the whole GPU. */
	for (at = 1; find(list, count, at) >= 0; at++)
		;
	list[count] = (struct instance){ at, id, place->start, NO_COMPUTE };
	*made = handle(gpu, at);
	return save(gpu, list, count + 1);
}

EXPORT result nvmlGpuInstanceDestroy(void *instance)
{
	INSTANCE(instance);

	if (list[at].compute != NO_COMPUTE || get(gpu->pci, "processes", 0))
		return IN_USE;
	list[at] = list[count - 1];
	return save(gpu, list, count - 1);
}

EXPORT result nvmlDeviceGetGpuInstances(void *device, unsigned int id, void **found, unsigned int *count)
{
	struct instance list[MOST_INSTANCES];
	unsigned int all, at;
	GPU(device);

	all = load(gpu, list);
	for (*count = at = 0; at < all; at++)
		if (list[at].profile == id)
			found[(*count)++] = handle(gpu, list[at].id);
	return OK;
}

struct instance_info {
	void *device;
	unsigned int id, profile;
	struct placement place;
};

EXPORT result nvmlGpuInstanceGetInfo(void *instance, struct instance_info *info)
{
	INSTANCE(instance);

	*info = (struct instance_info){ gpu, id, list[at].profile, { list[at].start, 0 } };
	return OK;
}

struct compute_profile_info {
	unsigned int version, id, slices, most, multiprocessors, engines[5];
	char name[96];
};

/* Profile 0 is one slice of it, and another one all of it: its number of slices. */
EXPORT result nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, unsigned int kind, unsigned int engines,
							    struct compute_profile_info *info)
{
	const struct profile *profile;
	unsigned int slices;
	INSTANCE(instance);

	if (info->version != VERSION(struct compute_profile_info, 2))
		return VERSION_MISMATCH;
	if (kind > 8 || engines)
		return INVALID_ARGUMENT;
	profile = profile_of(list[at].profile);
	slices = profile ? profile->slices : 0;
	if (kind != 0 && kind != slices - 1)
		return NOT_SUPPORTED;
	memset(info, 0, sizeof(*info));
	info->id = kind;
	info->slices = kind ? slices : 1;
	info->multiprocessors = 16 * info->slices;
	return OK;
}

EXPORT result nvmlGpuInstanceCreateComputeInstance(void *instance, unsigned int kind, void **made)
{
	const struct profile *profile;
	INSTANCE(instance);

	profile = profile_of(list[at].profile);
	if (list[at].compute != NO_COMPUTE)
		return INSUFFICIENT_RESOURCES;
	if (!profile || (kind && kind != profile->slices - 1))
		return INVALID_ARGUMENT;
	list[at].compute = kind;
	*made = (void *)((uintptr_t)instance | COMPUTE_BIT);
	return save(gpu, list, count);
}

EXPORT result nvmlGpuInstanceGetComputeInstances(void *instance, unsigned int kind, void **found, unsigned int *room)
{
	INSTANCE(instance);

	*room = list[at].compute == kind;
	if (*room)
		found[0] = (void *)((uintptr_t)instance | COMPUTE_BIT);
	return OK;
}

struct compute_info {
	void *device, *instance;
	unsigned int id, profile;
	struct placement place;
};

EXPORT result nvmlComputeInstanceGetInfo_v2(void *compute, struct compute_info *info)
{
	INSTANCE(compute);

	if (list[at].compute == NO_COMPUTE)
		return NOT_FOUND;
	*info = (struct compute_info){ gpu, handle(gpu, id), 0, list[at].compute, { 0, 0 } };
	return OK;
}

EXPORT result nvmlComputeInstanceDestroy(void *compute)
{
	INSTANCE(compute);

	if (list[at].compute == NO_COMPUTE)
		return NOT_FOUND;
	if (get(gpu->pci, "processes", 0))
		return IN_USE;
	list[at].compute = NO_COMPUTE;
	return save(gpu, list, count);
}

/* Confidential computing */

struct cc_state {
	unsigned int environment, feature, tools;
};

EXPORT result nvmlSystemGetConfComputeState(struct cc_state *state)
{
	TRY("system");
	*state = (struct cc_state){ 0, there("confidential"), 0 };
	return OK;
}

EXPORT result nvmlSystemGetConfComputeGpusReadyState(unsigned int *ready)
{
	TRY("system");
	if (!there("confidential"))
		return NOT_SUPPORTED;
	*ready = get("system", "ready", 0);
	return OK;
}

EXPORT result nvmlSystemSetConfComputeGpusReadyState(unsigned int ready)
{
	TRY("system");
	if (!there("confidential"))
		return NOT_SUPPORTED;
	return set("system", "ready", "%u", ready);
}
