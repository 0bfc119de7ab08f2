BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0004');
CREATE TABLE deleted (
	run_id VARCHAR(32) NOT NULL, 
	PRIMARY KEY (run_id)
);
CREATE TABLE files (
	run_id VARCHAR(32) NOT NULL, 
	path TEXT NOT NULL, 
	received_bytes BIGINT NOT NULL, 
	complete BOOLEAN NOT NULL, 
	PRIMARY KEY (run_id, path), 
	FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE jobs (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	queued_unix_ns BIGINT NOT NULL, 
	attempts INTEGER NOT NULL, 
	worker VARCHAR(200), 
	lease_until_unix_ns BIGINT, 
	progress FLOAT, 
	progress_note VARCHAR(200), 
	error TEXT, 
	PRIMARY KEY (id), 
	UNIQUE (run_id), 
	FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE login_failures (
	"key" VARCHAR(100) NOT NULL, 
	failures INTEGER NOT NULL, 
	last_unix_ns BIGINT NOT NULL, 
	blocked_until_unix_ns BIGINT NOT NULL, 
	PRIMARY KEY ("key")
);
CREATE TABLE metrics (
	run_id VARCHAR(32) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	value FLOAT NOT NULL, 
	PRIMARY KEY (run_id, name), 
	FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "metrics" VALUES('139221b3cb98','step_ns',100000.0);
INSERT INTO "metrics" VALUES('139221b3cb98','exposed_comm',0.0);
INSERT INTO "metrics" VALUES('139221b3cb98','skew',0.0);
INSERT INTO "metrics" VALUES('139221b3cb98','bubble',0.0);
INSERT INTO "metrics" VALUES('139221b3cb98','idle',5.10204081632653072553e-01);
CREATE TABLE ranks (
	run_id VARCHAR(32) NOT NULL, 
	rank INTEGER NOT NULL, 
	host VARCHAR(200), 
	step_ns BIGINT NOT NULL, 
	compute_ns BIGINT NOT NULL, 
	collective_ns BIGINT NOT NULL, 
	p2p_ns BIGINT NOT NULL, 
	skew_ns BIGINT NOT NULL, 
	bubble_ns BIGINT NOT NULL, 
	copy_ns BIGINT NOT NULL, 
	idle_ns BIGINT NOT NULL, 
	PRIMARY KEY (run_id, rank), 
	FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "ranks" VALUES('139221b3cb98',0,'host0',100000,40000,0,0,0,0,0,60000);
CREATE TABLE runs (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	created_unix_ns BIGINT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	error TEXT, 
	world_size INTEGER, 
	mesh VARCHAR(200), 
	backend VARCHAR(100), 
	step_ns BIGINT, 
	compute_ns BIGINT, 
	collective_ns BIGINT, 
	p2p_ns BIGINT, 
	skew_ns BIGINT, 
	bubble_ns BIGINT, 
	copy_ns BIGINT, 
	idle_ns BIGINT, 
	compute_share FLOAT, 
	collective_share FLOAT, 
	p2p_share FLOAT, 
	skew_share FLOAT, 
	bubble_share FLOAT, 
	copy_share FLOAT, 
	idle_share FLOAT, 
	steps INTEGER, 
	warnings INTEGER, bubble_fraction FLOAT, mfu FLOAT, 
	PRIMARY KEY (id)
);
INSERT INTO "runs" VALUES('139221b3cb98','released',1795418929380316181,'done',NULL,1,NULL,'nccl',100000,40000,0,0,0,0,0,60000,4.89795918367346927446e-01,0.0,0.0,0.0,0.0,0.0,5.10204081632653072553e-01,3,0,NULL,NULL);
CREATE TABLE tags (
	run_id VARCHAR(32) NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	value VARCHAR(200) NOT NULL, 
	PRIMARY KEY (run_id, "key"), 
	FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE tokens (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	created_unix_ns BIGINT NOT NULL, 
	last_used_unix_ns BIGINT, 
	revoked BOOLEAN DEFAULT 0 NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (sha256)
);
CREATE TABLE verdicts (
	run_id VARCHAR(32) NOT NULL, 
	answer VARCHAR(16) NOT NULL, 
	words VARCHAR(500) NOT NULL, 
	judged_unix_ns BIGINT NOT NULL, 
	PRIMARY KEY (run_id), 
	FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE INDEX ix_runs_created_unix_ns ON runs (created_unix_ns);
CREATE INDEX ix_metrics_name ON metrics (name);
CREATE INDEX ix_jobs_state ON jobs (state);
COMMIT;
