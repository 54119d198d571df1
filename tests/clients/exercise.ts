// A router and two nodes, by the generated TypeScript client alone: `exercise.js URL TOKEN`.
import assert from "node:assert/strict";
import { argv } from "node:process";
import { controlPlane, type Schemas } from "kvstrata-client";

const [url = "", token = ""] = argv.slice(2);
const client = controlPlane(url, token);

const digest = "00112233445566778899aabbccddeeff";
const keys = [0, 1, 2].map((n) => `${digest}00000000${n.toString(16).padStart(16, "0")}`);
const incarnation = "i1";

/** What an operation answered, unless it was a problem. */
function ok<T>(answer: { data?: T; error?: Schemas["Problem"]; response: Response }): T {
  if (answer.data === undefined) {
    throw new Error(`${answer.response.status}: ${answer.error?.code}: ${answer.error?.detail}`);
  }
  return answer.data;
}

function problem(answer: { error?: Schemas["Problem"] }): Schemas["Problem"] {
  assert(answer.error, "a problem was expected");
  return answer.error;
}

async function nodesCome(): Promise<void> {
  for (const id of ["a", "b"]) {
    const came = ok(
      await client.POST("/v1/nodes", {
        body: {
          id,
          incarnation,
          peer_address: `tcp://${id}.test:7801`,
          transports: ["tcp"],
          stores: [{ id: `s-${id}`, tier: "fs" }],
        },
      }),
    );
    assert.deepEqual([came.node, came.next_seq], [id, 0]);
  }
  const params = { path: { node_id: "a" } };
  const host = { used_bytes: 1, capacity_bytes: 2, chunks: 3 };
  const beat = ok(
    await client.PUT("/v1/nodes/{node_id}/heartbeat", {
      params,
      body: { incarnation, host, next_seq: 0 },
    }),
  );
  assert.equal(beat.snapshot_wanted, false);
  const told = ok(
    await client.POST("/v1/nodes/{node_id}/reports", {
      params,
      body: {
        incarnation,
        seq: 0,
        changes: [
          { location: "host", added: keys.slice(0, 2) },
          { location: "s-a", added: keys },
        ],
      },
    }),
  );
  assert.deepEqual([told.applied, told.next_seq], [true, 1]);
  const node = ok(await client.GET("/v1/nodes/{node_id}", { params }));
  assert.deepEqual([node.state, node.host, node.stores[0]?.tier], ["up", host, "fs"]);
}

async function whoHoldsWhat(): Promise<void> {
  const found = ok(await client.POST("/v1/placements:lookup", { body: { keys } }));
  assert.deepEqual(
    found.nodes.map((n) => [n.node, n.prefix, n.tiers["host"]?.prefix, n.tiers["fs"]?.prefix]),
    [["a", 3, 2, 3]],
  );
  const known = ok(await client.GET("/v1/namespaces"));
  assert.deepEqual(known.namespaces, [{ digest, document: null }]);
}

async function aTransfer(): Promise<void> {
  const plan = await client.POST("/v1/transfers", { body: { target: "b", keys, dry_run: true } });
  assert.equal(plan.response.status, 200);
  assert.equal(ok(plan).state, "planned");

  const asked = { params: { header: { "idempotency-key": "once" } }, body: { target: "b", keys } };
  const made = await client.POST("/v1/transfers", asked);
  assert.equal(made.response.status, 202);
  const first = ok(made);
  assert.equal(ok(await client.POST("/v1/transfers", asked)).id, first.id);
  assert.equal(first.counts.pending, 3);

  const params = { path: { node_id: "b" } };
  const due = ok(
    await client.GET("/v1/nodes/{node_id}/commands", {
      params: { ...params, query: { incarnation, wait: 5 } },
    }),
  );
  assert.deepEqual(
    due.commands.map((c) => [c.kind, c.transfer, c.keys, c.sources[0]?.address]),
    [["pull", first.id, keys, "tcp://a.test:7801"]],
  );
  const outcomes = Object.fromEntries(keys.map((key) => [key, "stored" as const]));
  const done = ok(
    await client.POST("/v1/nodes/{node_id}/progress", {
      params,
      body: { incarnation, transfer: first.id, final: true, outcomes },
    }),
  );
  const path = { transfer_id: first.id };
  const ended = ok(await client.GET("/v1/transfers/{transfer_id}", { params: { path } }));
  assert.deepEqual([done.state, ended.state], ["done", "done"]);
  assert.deepEqual(ended.keys.map((k) => k.outcome), ["stored", "stored", "stored"]);
}

async function pages(): Promise<void> {
  const second = ok(
    await client.POST("/v1/transfers", { body: { target: "b", keys: keys.slice(0, 1) } }),
  );
  const seen: Schemas["TransferSummary"][] = [];
  let after: string | null = null;
  for (let page = 0; page < 10; page++) {
    const query: { limit: number; after?: string } = { limit: 1, ...(after && { after }) };
    const list: Schemas["TransferList"] = ok(
      await client.GET("/v1/transfers", { params: { query } }),
    );
    seen.push(...list.transfers);
    after = list.next;
    if (after === null) break;
  }
  assert.deepEqual([seen.length, seen.at(-1)?.id], [2, second.id]);
  const path = { transfer_id: second.id };
  const stopped = ok(await client.DELETE("/v1/transfers/{transfer_id}", { params: { path } }));
  assert.equal(stopped.state, "cancelled");
}

async function otherWork(): Promise<void> {
  const lease = ok(await client.POST("/v1/leases", { body: { node: "a", keys, ttl: 30 } }));
  assert.equal(lease.state, "pending");
  const made = ok(
    await client.POST("/v1/evictions", { body: { chunks: { digests: [digest] }, nodes: ["a"] } }),
  );
  const params = { path: { eviction_id: made.id } };
  const read = ok(await client.GET("/v1/evictions/{eviction_id}", { params }));
  assert.deepEqual([read.state, read.nodes[0]?.dropped], ["running", null]);
  const acme = { params: { path: { tenant: "acme" } } };
  ok(await client.PUT("/v1/quotas/{tenant}", { ...acme, body: { max_transfers: 8 } }));
  const quota = ok(await client.GET("/v1/quotas/{tenant}", acme));
  assert.deepEqual([quota.max_transfers, quota.max_bytes, quota.use.chunks], [8, null, 0]);
  const metrics = ok(await client.GET("/metrics", { parseAs: "text" }));
  assert(metrics.includes("kvstrata_index_chunks 3.0"));
}

/** The first event of a stream, whose body is read as it comes. */
async function firstEvent(): Promise<void> {
  const stop = new AbortController();
  const answer = await client.GET("/v1/events", { parseAs: "stream", signal: stop.signal });
  const reader = ok(answer)?.getReader();
  const { value } = (await reader?.read()) ?? {};
  assert.match(new TextDecoder().decode(value), /^id: \S+\nevent: start\n/);
  stop.abort();
}

async function whatIsRefused(): Promise<void> {
  const stranger = await controlPlane(url, "wrong").GET("/v1/nodes");
  assert.equal(stranger.response.status, 401);
  assert.equal(problem(stranger).code, "unauthenticated");

  const nowhere = problem(await client.POST("/v1/transfers", { body: { target: "z", keys } }));
  assert.deepEqual([nowhere.status, nowhere.code], [404, "missing"]);
  const params = { header: { "idempotency-key": "once" } };
  const twice = await client.POST("/v1/transfers", { params, body: { target: "a", keys } });
  assert.equal(problem(twice).code, "conflict");
  const report = { incarnation, seq: 1, changes: [{ location: "host", added: ["zz"] }] };
  const wrong = await client.POST("/v1/nodes/{node_id}/reports", {
    params: { path: { node_id: "a" } },
    body: report,
  });
  assert.deepEqual(problem(wrong).errors[0]?.loc, ["body", "changes", 0, "added", 0]);
  // @ts-expect-error - a misspelt field is found before it is sent
  const misspelt = await client.POST("/v1/transfers", { body: { target: "b", kees: keys } });
  assert.equal(problem(misspelt).code, "malformed");
}

await nodesCome();
await whoHoldsWhat();
await aTransfer();
await pages();
await otherWork();
await firstEvent();
await whatIsRefused();
console.log("all of it");
