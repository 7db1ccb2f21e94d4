// SPDX-License-Identifier: GPL-2.0
/*
 * attach MODE DEVICE...: open the devices and print what happened and when.
 *
 *   nonblock   open all with O_NONBLOCK, then wait for each with the ioctl
 *   block      one blocking open per device, each in its own thread
 *   serial     one blocking open after the other
 *   close      open with O_NONBLOCK and close at once
 *   kill       open with O_NONBLOCK, give up after a second, be killed
 *   poll       open with O_NONBLOCK, poll at once and when complete
 *
 * One line per device: NAME open=MS done=MS rc=N status=0xN other=ERRNO.
 * Build: gcc -static -O2 -pthread -o attach attach.c
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

struct wait_open_complete {
	int32_t rc;
	uint32_t adapter_status;
};
#define WAIT_OPEN_COMPLETE _IOWR('F', 218, struct wait_open_complete)

struct job {
	const char *path;
	int flags, fd, opened, done, error, other;
	struct wait_open_complete result;
	char line[128];
	pthread_t thread;
};

static struct timespec begin;

static int elapsed_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000;
}

static void *open_one(void *data)
{
	struct job *job = data;

	job->fd = open(job->path, O_RDWR | O_CLOEXEC | job->flags);
	job->error = job->fd < 0 ? errno : 0;
	job->opened = elapsed_ms();
	return NULL;
}

static void *wait_one(void *data)
{
	struct job *job = data;
	ssize_t length;

	if (job->fd < 0)
		return NULL;
	if (ioctl(job->fd, WAIT_OPEN_COMPLETE, &job->result))
		job->error = errno;
	job->done = elapsed_ms();
	job->other = ioctl(job->fd, _IO('F', 1)) ? errno : 0;
	length = read(job->fd, job->line, sizeof(job->line) - 1);
	if (length > 0)
		job->line[length - 1] = 0;
	else
		snprintf(job->line, sizeof(job->line), "%s", strerror(errno));
	return NULL;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	int threads = strcmp(mode, "serial") != 0, count = argc - 2, i;
	struct job *jobs = calloc(argc, sizeof(*jobs));

	if (count < 1 || !jobs) {
		fprintf(stderr, "usage: attach nonblock|block|serial|close|kill|poll DEVICE...\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (i = 0; i < count; i++) {
		jobs[i].path = argv[i + 2];
		if (strcmp(mode, "block") && strcmp(mode, "serial"))
			jobs[i].flags = O_NONBLOCK;
		if (!strcmp(mode, "block"))
			pthread_create(&jobs[i].thread, NULL, open_one, &jobs[i]);
		else
			open_one(&jobs[i]);
	}
	for (i = 0; i < count && !strcmp(mode, "block"); i++)
		pthread_join(jobs[i].thread, NULL);
	if (!strcmp(mode, "close")) {
		for (i = 0; i < count; i++)
			close(jobs[i].fd);
		printf("close all=%d ms\n", elapsed_ms());
		return 0;
	}
	if (!strcmp(mode, "kill")) {
		printf("kill opened=%d ms\n", jobs[0].opened);
		sleep(1);
		raise(SIGKILL);
	}
	for (i = 0; i < count && !strcmp(mode, "poll"); i++) {
		struct pollfd before = { .fd = jobs[i].fd, .events = POLLIN }, after = before;

		poll(&before, 1, 0);
		wait_one(&jobs[i]);
		poll(&after, 1, 0);
		printf("poll before=0x%x after=0x%x (POLLERR is 0x%x)\n", before.revents, after.revents, POLLERR);
	}
	for (i = 0; i < count && threads; i++)
		pthread_create(&jobs[i].thread, NULL, wait_one, &jobs[i]);
	for (i = 0; i < count; i++) {
		if (threads)
			pthread_join(jobs[i].thread, NULL);
		else
			wait_one(&jobs[i]);
		printf("%s open=%d done=%d rc=%d status=0x%x errno=%d other=%d [%s]\n", jobs[i].path, jobs[i].opened,
		       jobs[i].done, jobs[i].result.rc, jobs[i].result.adapter_status, jobs[i].error,
		       jobs[i].other, jobs[i].line);
	}
	printf("%s all=%d ms\n", mode, elapsed_ms());
	return 0;
}
